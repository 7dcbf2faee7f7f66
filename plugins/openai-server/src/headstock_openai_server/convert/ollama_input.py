"""Convert the bodies of `/api/chat` and `/api/generate` to a chat request."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from headstock.errors import shorten
from headstock_openai_server.api.errors import refuse
from headstock_openai_server.api.ignored import IgnoredFields
from headstock_openai_server.api.ollama_body import (
    GenerateBody,
    GeneratingBody,
    OllamaChatBody,
    OllamaMessage,
    OllamaOptions,
)
from headstock_openai_server.api.schema import (
    CalledFunction,
    ChatBody,
    ChatMessage,
    MessageToolCall,
)
from headstock_openai_server.api.structured_outputs import JsonSchemaBody, ResponseFormat
from headstock_openai_server.convert.conversations import check_strict_tools
from headstock_openai_server.convert.thinking import SWITCHES, switch_thinking

SAMPLING_NAMES = {
    "repetition_penalty": "repeat_penalty",
    **{
        name: name
        for name in (
            *("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
            *("seed", "stop"),
        )
    },
}
"""Field of a chat -> its name in `options`."""
CHAT_NAMES = {
    "chat_template_kwargs": "think",
    "max_completion_tokens": "options.num_predict",
    "max_tokens": "options.num_predict",
    "reasoning_effort": "think",
    "response_format": "format",
    "structured_outputs": "format",
    **{name: f"options.{field}" for name, field in SAMPLING_NAMES.items()},
}
"""Field of a chat -> its name in Ollama's API."""
RANDOM = -1
"""The seed of requests that want none."""


def make_chat_body(
    body: OllamaChatBody | GenerateBody, read: Collection[str], ignored: IgnoredFields
) -> ChatBody:
    """The chat, whose template reads the variables `read`; `ignored` gets fields without effect.

    raises: ApiError
    """
    if isinstance(body, GenerateBody) and body.raw:
        if body.system:
            raise refuse("system is not supported with raw; write it into the prompt", "system")
        if body.think is not None:
            ignored.add("think")
    options = body.options or OllamaOptions()
    sampling = {name: getattr(options, field) for name, field in SAMPLING_NAMES.items()}
    if sampling["seed"] == RANDOM:
        sampling["seed"] = None
    num_tokens = options.num_predict
    tools = body.tools if isinstance(body, OllamaChatBody) else None
    check_strict_tools(tools or ())
    return ChatBody(
        n=1,
        messages=list_messages(body),
        tools=tools,
        # Ollama's numbers for an answer without a limit, or as long as the context
        max_completion_tokens=None if num_tokens in (-1, -2) else num_tokens,
        response_format=make_response_format(body.format),
        reasoning_effort=body.think if isinstance(body.think, str) else None,
        chat_template_kwargs=make_thinking(body, read, ignored),
        stream=body.stream is not False,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
        **sampling,
    )


def make_thinking(
    body: GeneratingBody, read: Collection[str], ignored: IgnoredFields
) -> dict[str, Any]:
    """The variables of the template; without the field, it decides.   raises: ApiError"""
    think = body.think
    if think is None or (isinstance(think, str) and not any(name in read for name in SWITCHES)):
        return {}
    return switch_thinking(read, "think", ignored, thinks=think is not False)


def make_response_format(wanted: str | dict[str, Any] | None) -> ResponseFormat | None:
    """The structure of the answer.   raises: ApiError"""
    if isinstance(wanted, dict):
        return ResponseFormat(type="json_schema", json_schema=JsonSchemaBody(schema=wanted))
    if not wanted:
        return None
    if wanted != "json":
        raise refuse(f"format: expected json or a JSON schema, got {shorten(wanted)}", "format")
    return ResponseFormat(type="json_object")


def list_messages(body: OllamaChatBody | GenerateBody) -> list[ChatMessage]:
    """The messages of a chat."""
    if isinstance(body, OllamaChatBody):
        return make_messages(body.messages or ())
    system = [ChatMessage(role="system", content=body.system)] if body.system else []
    return [*system, ChatMessage(role="user", content=body.prompt)]


def make_messages(messages: Sequence[OllamaMessage]) -> list[ChatMessage]:
    """The messages in the form of a chat, in which calls and their results have ids."""
    made: list[ChatMessage] = []
    waiting: dict[str, str] = {}  # the id of a call without a result -> its name
    num_calls = 0
    for message in messages:
        calls = []
        for call in message.tool_calls or ():
            num_calls += 1
            # Nine digits: templates of Mistral take no other length.
            call_id = call.id or f"{num_calls:09d}"
            waiting[call_id] = call.function.name
            function = CalledFunction(
                name=call.function.name,
                arguments=json.dumps(call.function.arguments, ensure_ascii=False),
            )
            calls.append(MessageToolCall(id=call_id, function=function))
        result = message.tool_call_id
        if message.role == "tool":
            result = result or find_call(waiting, message.tool_name)
            waiting.pop(result or "", None)
        made.append(
            ChatMessage(
                role=message.role,
                content=message.content if message.content or not calls else None,
                reasoning=message.thinking,
                tool_calls=calls or None,
                tool_call_id=result,
                name=message.tool_name,
            )
        )
    return made


def find_call(waiting: dict[str, str], name: str | None) -> str | None:
    """The id of the first call without a result, of the tool if it is named."""
    return next((id for id, each in waiting.items() if name in (None, each)), None)
