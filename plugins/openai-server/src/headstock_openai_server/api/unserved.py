"""The fields that nothing serves, the values of them that ask for nothing, and ways out."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import get_annotations
from types import MappingProxyType

from headstock_openai_server.api.bodies import Body
from headstock_openai_server.api.responses_body import (
    FunctionCallInput,
    FunctionOutputInput,
    InputPart,
    ReasoningInput,
    ReasoningOptions,
    ResponsesBody,
    ResponsesStreamOptions,
    TextOptions,
)
from headstock_openai_server.api.schema import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    EmbeddingBody,
    StreamOptions,
)

SAME: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "access_programs": (),
        "add_special_tokens": (),
        "annotations": ([],),
        "audio": (),
        "background": (False,),
        "background_options": (),
        "bad_words": ([],),
        "best_of": (1,),
        "caller": (),
        "chat_template": (),
        "context": ("auto",),
        "context_management": ([],),
        "conversation": (),
        "dimensions": (),
        "documents": (),
        "echo": (False,),
        "encrypted_content": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "generate_summary": (),
        "guided_decoding_backend": ("auto", "guidance"),
        "guided_whitespace_pattern": (),
        "image": (),
        "include_obfuscation": (False,),
        "include_reasoning": (True,),
        "logits_processors": ([],),
        "logprobs": ([],),
        "metadata": ({},),
        "modalities": (["text"],),
        "mode": ("standard",),
        "moderation": (),
        "no_stop_trim": (False,),
        "prediction": (),
        "previous_response_id": (),
        "prompt": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": ("in_memory",),
        "refusal": (),
        "request_id": (),
        "return_hidden_states": (False,),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "separate_reasoning": (True,),
        "service_tier": ("auto", "default"),
        "spaces_between_special_tokens": (True,),
        "store": (False,),
        "stream_reasoning": (True,),
        "suffix": ("",),
        "summary": ("auto",),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
        "truncate_prompt_tokens": (),
        "use_beam_search": (False,),
        "verbosity": ("medium",),
        "web_search_options": (),
    }
)
"""Fields that are not served -> the values, beside null, that match the default behaviour."""

HINTS: Mapping[str, str] = MappingProxyType(
    {
        "background": "nothing is stored; stream the answer",
        "best_of": "ask for n answers and choose among them",
        "chat_template": "the server's own template is used; --chat-template sets it",
        "conversation": "nothing is stored; send the earlier items in input",
        "dimensions": "vectors are as long as the model's hidden states; cut them yourself",
        "encrypted_content": "reasoning comes and goes as plain text, in content",
        "previous_response_id": "nothing is stored; send the earlier items in input",
        "prompt": "nothing is stored; send its text in instructions and input",
        "guided_decoding_backend": "headstock serve --grammar chooses the plugin; leave it out",
        "guided_whitespace_pattern": "headstock serve --opt llguidance.whitespace=on allows white "
        "space in JSON; leave it out",
        "no_stop_trim": "include_stop_str_in_output keeps the stop string",
        "request_id": "send an X-Request-Id header",
        "summary": "reasoning comes whole, as reasoning_text",
        "top_logprobs": "/v1/chat/completions has them",
        "truncation": "send fewer items in input",
    }
)
"""Alternatives to fields that are not served."""


def list_unserved(kind: type[Body]) -> tuple[str, ...]:
    """The fields of a body that are declared for the sake of a refusal: all of type Any."""
    return tuple(
        name
        for each in kind.__mro__
        for name, annotation in get_annotations(each).items()
        if annotation == "Any"
    )


UNSERVED: Mapping[type[Body], tuple[str, ...]] = MappingProxyType(
    {
        kind: list_unserved(kind)
        for kind in (
            *(StreamOptions, ChatMessage, ChatBody, CompletionBody, EmbeddingBody),
            *(ResponsesBody, ResponsesStreamOptions, ReasoningOptions, TextOptions),
            *(InputPart, FunctionCallInput, FunctionOutputInput, ReasoningInput),
        )
    }
)
"""The fields of each body that are refused unless they change nothing."""


def find_unserved(body: Body) -> tuple[str, str] | None:
    """The first field that requests an unsupported feature, and the alternative; None if all are
    supported."""
    for name in UNSERVED.get(type(body), ()):
        value = getattr(body, name)
        # By type too: 1 == True, and a server must not take one for the other.
        if value is not None and not any(
            type(value) is type(same) and value == same for same in SAME[name]
        ):
            return name, HINTS.get(name, "leave it out")
    return None
