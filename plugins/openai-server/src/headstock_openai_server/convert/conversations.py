"""From the fields of a body to a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headstock.text import CONVERSATION_OPTIONS, Conversation
from headstock_openai_server.api.errors import refuse
from headstock_openai_server.api.schema import ChatBody, ChatMessage, TokenizeBody
from headstock_openai_server.api.unserved import UNSERVED
from headstock_openai_server.settings import ServerSettings

ROLES = ("system", "developer", "user", "assistant", "tool")


def make_conversation(
    body: ChatBody | TokenizeBody, messages: Sequence[ChatMessage], settings: ServerSettings
) -> Conversation:
    """The conversation of a body, within the limits.   raises: ApiError, RequestError"""
    if len(body.tools or ()) > settings.max_tools:
        raise refuse(
            f"tools has {len(body.tools or ())} entries; at most {settings.max_tools} are taken",
            "tools",
        )
    given = {
        name: getattr(body, name, None) for name in CONVERSATION_OPTIONS if name != "chat_template"
    }
    options = {name: to_plain(value) for name, value in given.items() if value is not None}
    return Conversation(messages=make_messages(messages, settings.max_messages), **options)


def make_messages(messages: Sequence[ChatMessage], most: int) -> list[dict[str, Any]]:
    """The messages as conversations have them.   raises: ApiError"""
    if len(messages) > most:
        raise refuse(f"messages has {len(messages)} entries; at most {most} are taken", "messages")
    return [_make_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def to_plain(value: Any) -> Any:
    """A body or a part of one as JSON, without omitted fields."""
    if isinstance(value, list):
        return [to_plain(each) for each in value]
    if not isinstance(value, msgspec.Struct):
        return value
    pairs = ((name, getattr(value, name)) for name in value.__struct_fields__)
    return {name: to_plain(each) for name, each in pairs if each is not None}


def _make_message(message: ChatMessage, where: str) -> dict[str, Any]:
    if message.role not in ROLES:
        raise refuse(
            f"{where}.role {message.role[:64]!r} is not supported; served: {', '.join(ROLES)}",
            f"{where}.role",
        )
    for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
        kind = part.get("type")
        if kind != "text":
            shown = kind[:64] if isinstance(kind, str) else kind
            raise refuse(
                f"{where}.content[{index}].type {shown!r} is not supported; only text is",
                f"{where}.content[{index}].type",
            )
        for name in part.keys() - {"type", "text"}:
            raise refuse(
                f"{where}.content[{index}].{name[:64]} is not supported; leave it out",
                f"{where}.content[{index}].{name[:64]}",
            )
    if message.role == "tool" and message.content is None:
        raise refuse(
            f"{where}.content is missing; a tool's message has its result", f"{where}.content"
        )
    rendered = {"content": message.content, **to_plain(message)}
    for name in UNSERVED[ChatMessage]:  # what is left of them says nothing
        rendered.pop(name, None)
    for call in rendered.get("tool_calls", ()):
        call.pop("index", None)  # of streams, which some clients send back
    return rendered
