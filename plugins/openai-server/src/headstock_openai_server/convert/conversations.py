"""Convert a body to a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headstock.text import CONVERSATION_OPTIONS, Conversation
from headstock_openai_server.api.bodies import Body
from headstock_openai_server.api.errors import refuse
from headstock_openai_server.api.ignored import IgnoredFields
from headstock_openai_server.api.schema import (
    ChatBody,
    ChatMessage,
    TextPart,
    TokenizeBody,
    ToolBody,
)
from headstock_openai_server.api.strict_schemas import check_strict
from headstock_openai_server.api.unserved import IGNORED, UNSERVED
from headstock_openai_server.api.validation import convert_part
from headstock_openai_server.settings import ServerSettings

ROLES = ("system", "developer", "user", "assistant", "tool")


def make_conversation(
    body: ChatBody | TokenizeBody,
    messages: Sequence[ChatMessage],
    settings: ServerSettings,
    ignored: IgnoredFields,
) -> Conversation:
    """The conversation of a body, within the limits; `ignored` gets fields without effect.

    raises: ApiError, RequestError
    """
    if len(body.tools or ()) > settings.max_tools:
        raise refuse(
            f"tools has {len(body.tools or ())} entries; at most {settings.max_tools} are taken",
            "tools",
        )
    given = {
        name: getattr(body, name, None) for name in CONVERSATION_OPTIONS if name != "chat_template"
    }
    options = {name: to_plain(value) for name, value in given.items() if value is not None}
    made = make_messages(messages, settings.max_messages, ignored)
    return Conversation(messages=made, **options)


def check_strict_tools(tools: Sequence[ToolBody]) -> None:
    """Raise ApiError for a tool whose schema strict mode does not take."""
    for index, tool in enumerate(tools):
        if tool.function.strict:
            check_strict(tool.function.parameters, f"tools[{index}].function.parameters")


def make_messages(
    messages: Sequence[ChatMessage], most: int, ignored: IgnoredFields
) -> list[dict[str, Any]]:
    """The messages in the form of conversations.   raises: ApiError"""
    if len(messages) > most:
        raise refuse(f"messages has {len(messages)} entries; at most {most} are taken", "messages")
    return [_make_message(message, f"messages[{i}]", ignored) for i, message in enumerate(messages)]


def to_plain(value: Any) -> Any:
    """A body or a part of one as JSON, without omitted fields and those that have no use here."""
    if isinstance(value, list):
        return [to_plain(each) for each in value]
    if not isinstance(value, Body):
        return value
    kind = type(value)
    unused = (*UNSERVED.get(kind, ()), *IGNORED.get(kind, ()))
    pairs = ((name, getattr(value, name)) for name in kind.__struct_fields__ if name not in unused)
    return {name: to_plain(each) for name, each in pairs if each is not None}


def _make_message(message: ChatMessage, where: str, ignored: IgnoredFields) -> dict[str, Any]:
    if message.role not in ROLES:
        raise refuse(
            f"{where}.role {message.role[:64]!r} is not supported; served: {', '.join(ROLES)}",
            f"{where}.role",
        )
    content: Any = message.content
    if isinstance(content, list):
        content = [
            _make_part(part, f"{where}.content[{index}]", ignored)
            for index, part in enumerate(content)
        ]
    if message.role == "tool" and message.content is None:
        raise refuse(
            f"{where}.content is missing; a tool's message has its result", f"{where}.content"
        )
    rendered = {**to_plain(message), "content": content}
    for call in rendered.get("tool_calls", ()):
        call.pop("index", None)  # set in streams, and some clients send it back
    return rendered


def _make_part(part: dict[str, Any], where: str, ignored: IgnoredFields) -> dict[str, Any]:
    kind = part.get("type")
    if kind != "text":
        shown = kind[:64] if isinstance(kind, str) else kind
        raise refuse(f"{where}.type {shown!r} is not supported; only text is", f"{where}.type")
    return {"type": "text", "text": convert_part(part, TextPart, where, ignored).text}
