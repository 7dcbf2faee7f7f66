"""Unsupported fields, their harmless values, and alternatives."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import get_annotations
from types import MappingProxyType

from headstock_openai_server.api.bodies import Body
from headstock_openai_server.api.messages_body import (
    ClientTool,
    MessagesBody,
    PromptBody,
    TextBlockBody,
    ThinkingOptions,
    ToolResultBody,
    ToolUseBody,
)
from headstock_openai_server.api.ollama_body import (
    EmbedBody,
    GenerateBody,
    OllamaChatBody,
    OllamaMessage,
    OllamaOptions,
    ShowBody,
)
from headstock_openai_server.api.responses_body import (
    FunctionCallInput,
    FunctionOutputInput,
    FunctionTool,
    InputMessage,
    InputPart,
    ReasoningInput,
    ReasoningOptions,
    ResponsesBody,
    ResponsesStreamOptions,
    TextOptions,
)
from headstock_openai_server.api.schema import (
    CalledFunction,
    ChatBody,
    ChatMessage,
    CompletionBody,
    EmbeddingBody,
    FunctionBody,
    MessageToolCall,
    RerankBody,
    ScoreBody,
    StreamOptions,
    TextPart,
    ToolBody,
)

SAME: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "access_programs": (),
        "activation": (True,),
        "add_special_tokens": (),
        "allowed_callers": (["direct"],),
        "annotations": ([],),
        "audio": (),
        "background": (False,),
        "background_options": (),
        "bad_words": ([],),
        "best_of": (1,),
        "chat_template": (),
        "container": (),
        "context": ("auto", []),
        "context_management": ([],),
        "conversation": (),
        "defer_loading": (False,),
        "dimensions": (),
        "display": ("summarized",),
        "echo": (False,),
        "encoding_format": ("float",),
        "encrypted_content": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "guided_decoding_backend": ("auto", "guidance"),
        "guided_whitespace_pattern": (),
        "image": (),
        "images": ([],),
        "include_obfuscation": (False,),
        "input_examples": ([],),
        "is_error": (False,),
        "logits_processors": ([],),
        "logprobs": ([],),
        "max_chunks_per_doc": (),
        "mcp_servers": ([],),
        "metadata": ({},),
        "mirostat": (0,),
        "mm_processor_kwargs": (),
        "modalities": (["text"],),
        "mode": ("standard",),
        "moderation": (),
        "no_stop_trim": (False,),
        "output_schema": (),
        "penalize_newline": (True,),
        "previous_response_id": (),
        "prompt": (),
        "prompt_cache_retention": ("in_memory",),
        "rank_fields": (["text"],),
        "refusal": (),
        "repeat_last_n": (-1,),
        "return_embeddings": (False,),
        "return_hidden_states": (False,),
        "separate_reasoning": (True,),
        "service_tier": ("auto", "default"),
        "softmax": (True,),
        "spaces_between_special_tokens": (True,),
        "store": (False,),
        "stream_reasoning": (True,),
        "suffix": ("",),
        "summary": ("auto",),
        "template": ("",),
        "tfs_z": (1, 1.0),
        "toolset_name": (),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
        "truncate_prompt_tokens": (),
        "typical_p": (1, 1.0),
        "use_activation": (True,),
        "use_beam_search": (False,),
        "verbosity": ("medium",),
        "web_search_options": (),
    }
)
"""Unsupported field -> the values, besides null, that match the default behaviour."""

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
        "images": "only text is",
        "repeat_last_n": "repeat_penalty looks at all tokens, as -1 says",
        "template": "the server's own template is used; --chat-template sets it",
        "no_stop_trim": "include_stop_str_in_output keeps the stop string",
        "request_id": "send an X-Request-Id header",
        "summary": "reasoning comes whole, as reasoning_text",
        "return_embeddings": "/v1/embeddings has them",
        "top_logprobs": "/v1/chat/completions has them",
        "truncate_prompt_tokens": "shorten the prompt's token ids, or documents by "
        "max_tokens_per_doc",
        "truncation": "send fewer items in input",
    }
)
"""Unsupported field -> an alternative."""


def list_declared(kind: type[Body], annotation: str) -> tuple[str, ...]:
    """The fields of a body that are annotated so."""
    annotations: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        annotations |= get_annotations(each)
    return tuple(name for name, given in annotations.items() if given == annotation)


KINDS = (
    *(StreamOptions, ChatMessage, ChatBody, CompletionBody, EmbeddingBody, TextPart),
    *(MessageToolCall, CalledFunction, ToolBody, FunctionBody, RerankBody, ScoreBody),
    *(ResponsesBody, ResponsesStreamOptions, ReasoningOptions, TextOptions, InputMessage),
    *(InputPart, FunctionCallInput, FunctionOutputInput, ReasoningInput, FunctionTool),
    *(PromptBody, MessagesBody, ClientTool, ThinkingOptions),
    *(TextBlockBody, ToolUseBody, ToolResultBody),
    *(OllamaOptions, OllamaMessage, OllamaChatBody, GenerateBody, EmbedBody, ShowBody),
)
"""The bodies with fields that have no use here."""
UNSERVED: Mapping[type[Body], tuple[str, ...]] = MappingProxyType(
    {kind: names for kind in KINDS if (names := list_declared(kind, "Any"))}
)
"""Body -> its fields that only take default values."""
IGNORED: Mapping[type[Body], tuple[str, ...]] = MappingProxyType(
    {kind: names for kind in KINDS if (names := list_declared(kind, "NoEffect"))}
)
"""Body -> its fields that change no token."""


def is_default(name: str, value: object) -> bool:
    """Whether the field requests nothing besides the default behaviour."""
    # Compared by type too: 1 == True, but they mean different things in a body.
    return value is None or any(
        type(value) is type(same) and value == same for same in SAME.get(name, ())
    )


def list_unserved(body: Body) -> list[str]:
    """The fields that request an unsupported feature."""
    names = UNSERVED.get(type(body), ())
    return [name for name in names if not is_default(name, getattr(body, name))]


def list_ignored(body: Body) -> list[str]:
    """The fields that request what changes no token."""
    names = IGNORED.get(type(body), ())
    return [name for name in names if not is_default(name, getattr(body, name))]
