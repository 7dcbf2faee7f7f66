"""Convert the body of `/v1/responses` to a chat request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headstock.errors import shorten
from headstock_openai_server.api.errors import refuse
from headstock_openai_server.api.ignored import IgnoredFields
from headstock_openai_server.api.responses_body import (
    INPUT_ITEMS,
    FunctionCallInput,
    FunctionOutputInput,
    InputItem,
    InputMessage,
    InputPart,
    ReasoningInput,
    ResponsesBody,
    TextOptions,
)
from headstock_openai_server.api.schema import (
    CalledFunction,
    ChatBody,
    ChatMessage,
    EngineBody,
    MessageToolCall,
)
from headstock_openai_server.api.strict_schemas import check_strict
from headstock_openai_server.api.structured_outputs import JsonSchemaBody, ResponseFormat
from headstock_openai_server.api.validation import convert_part
from headstock_openai_server.convert.responses_tools import (
    FunctionName,
    make_tool_choice,
    make_tools,
)

CHAT_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
"""Field of a chat -> its name in `/v1/responses`."""
TEXT_PARTS = ("input_text", "output_text", "text")
REASONING_PARTS = ("reasoning_text", "summary_text", "text")
INCLUDED = ("reasoning.encrypted_content",)
"""Supported values of `include`: reasoning is plain text and can be sent back unencrypted."""


def make_chat_body(
    body: ResponsesBody, most: int, ignored: IgnoredFields
) -> tuple[ChatBody, dict[str, FunctionName]]:
    """The chat, of at most `most` items, and the functions by their names in it; `ignored` gets
    fields without effect.

    raises: ApiError
    """
    for index, name in enumerate(body.include or ()):
        if name not in INCLUDED:
            raise refuse(
                f"include[{index}] {name[:64]!r} is not supported; leave it out",
                f"include[{index}]",
                "unsupported",
            )
    shared = {name: getattr(body, name) for name in EngineBody.__struct_fields__}
    tools, names = make_tools(body.tools or (), ignored)
    chat = ChatBody(
        **shared,
        n=1,
        messages=make_messages(body, most, ignored),
        max_completion_tokens=body.max_output_tokens,
        tools=tools or None,
        tool_choice=make_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=make_response_format(body.text),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return chat, names


def make_response_format(text: TextOptions | None) -> ResponseFormat | None:
    """The structure of the answer.   raises: ApiError"""
    wanted = text.format if text else None
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        if wanted.schema is not None:
            raise refuse(
                f"text.format.schema is of type json_schema, and the type is {wanted.type}; change "
                "the type or leave the schema out",
                "text.format.schema",
            )
        return ResponseFormat(type=wanted.type)
    if wanted.schema is None:
        raise refuse(
            "text.format.schema is missing; type json_schema needs it", "text.format.schema"
        )
    if wanted.strict:
        check_strict(wanted.schema, "text.format.schema")
    return ResponseFormat(
        type="json_schema", json_schema=JsonSchemaBody(name=wanted.name, schema=wanted.schema)
    )


def make_messages(body: ResponsesBody, most: int, ignored: IgnoredFields) -> list[ChatMessage]:
    """The messages that the items of the input form.   raises: ApiError"""
    messages: list[ChatMessage] = []
    if body.instructions is not None:
        messages.append(ChatMessage(role="system", content=body.instructions))
    if isinstance(body.input, str):
        return [*messages, ChatMessage(role="user", content=body.input)]
    if len(messages) + len(body.input) > most:
        raise refuse(
            f"input has {len(body.input)} items; at most {most} are taken, instructions included",
            "input",
        )
    for index, value in enumerate(body.input):
        where = f"input[{index}]"
        _add_item(messages, decode_item(value, where, ignored), where, ignored)
    for message in messages:
        if message.content is None and message.tool_calls is None:
            message.content = ""  # an answer that ended during its reasoning
    return messages


def decode_item(value: dict[str, Any], where: str, ignored: IgnoredFields) -> InputItem:
    """The item of the input at `where`.   raises: ApiError"""
    kind = value.get("type", "message")
    if not isinstance(kind, str) or kind not in INPUT_ITEMS:
        hint = (
            "nothing is stored; send the item itself"
            if kind == "item_reference"
            else f"served: {', '.join(INPUT_ITEMS)}"
        )
        raise refuse(
            f"{where}.type {shorten(kind)} is not supported; {hint}", f"{where}.type", "unsupported"
        )
    return convert_part(value, INPUT_ITEMS[kind], where, ignored)


def _add_item(
    messages: list[ChatMessage], item: InputItem, where: str, ignored: IgnoredFields
) -> None:
    """Add an item to its message: consecutive reasoning, text and calls form one message of the
    assistant.
    """
    turn = messages[-1] if messages and messages[-1].role == "assistant" else None
    match item:
        case InputMessage(role="assistant"):
            text = join_parts(item.content, TEXT_PARTS, f"{where}.content", ignored)
            if turn is None or turn.content is not None:
                messages.append(ChatMessage(role="assistant", content=text))
            else:
                turn.content = text
        case InputMessage():
            text = join_parts(item.content, TEXT_PARTS, f"{where}.content", ignored)
            messages.append(ChatMessage(role=item.role, content=text))
        case ReasoningInput():
            text = join_parts(item.content or [], REASONING_PARTS, f"{where}.content", ignored)
            summary = join_parts(item.summary, REASONING_PARTS, f"{where}.summary", ignored)
            messages.append(ChatMessage(role="assistant", reasoning=text or summary or None))
        case FunctionCallInput():
            name = FunctionName(item.name, item.namespace).flat
            function = CalledFunction(name=name, arguments=item.arguments)
            call = MessageToolCall(id=item.call_id, function=function)
            if turn is None:
                messages.append(ChatMessage(role="assistant", tool_calls=[call]))
            else:
                turn.tool_calls = [*(turn.tool_calls or ()), call]
        case FunctionOutputInput():
            text = join_parts(item.output, TEXT_PARTS, f"{where}.output", ignored)
            messages.append(ChatMessage(role="tool", content=text, tool_call_id=item.call_id))


def join_parts(
    content: str | list[dict[str, Any]], kinds: Sequence[str], where: str, ignored: IgnoredFields
) -> str:
    """The text of parts, whose types are `kinds`.   raises: ApiError"""
    if isinstance(content, str):
        return content
    texts = []
    for index, value in enumerate(content):
        part, kind = f"{where}[{index}]", value.get("type")
        if kind not in kinds:
            raise refuse(
                f"{part}.type {shorten(kind)} is not supported; only text is",
                f"{part}.type",
                "unsupported",
            )
        texts.append(convert_part(value, InputPart, part, ignored).text)
    return "".join(texts)
