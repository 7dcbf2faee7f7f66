"""The messages of a conversation, checked, and as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headstock.errors import RequestError, describe_type, shorten
from headstock.text.template_contents import takes_parts

Message = Mapping[str, object]
"""A message: "role", "content" and whatever else the template reads. Content is text or a list of
parts {"type": "text", "text": ...}. Calls of tools have the form of OpenAI's API.
"""


def check_messages(messages: object) -> list[dict[str, object]]:
    """A copy of the messages, with text as their content.   raises: RequestError"""
    if not isinstance(messages, list | tuple) or not messages:
        got = "an empty list" if isinstance(messages, list | tuple) else describe_type(messages)
        raise RequestError(
            f"messages: expected a list of one or more turns, got {got}", parameter="messages"
        )
    return [_check_message(message, index) for index, message in enumerate(messages)]


def _check_message(message: object, index: int) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise RequestError(
            f"messages[{index}]: expected an object with a role and content, got "
            f"{describe_type(message)}",
            parameter="messages",
        )
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise RequestError(
            f"messages[{index}].role: expected text, got {describe_type(role)}",
            parameter="messages",
        )
    if content is None and not message.get("tool_calls"):
        raise RequestError(
            f"messages[{index}] (role {shorten(role)}) has no content; only a message with "
            "tool_calls may lack it",
            parameter="messages",
        )
    _check_calls(message.get("tool_calls"), index)
    return {**message, "content": _join_text_parts(content, index)}


def _check_calls(calls: object, index: int) -> None:
    """Raise RequestError for calls of tools that are not in the form of OpenAI's API."""
    if calls is None:
        return
    where = f"messages[{index}].tool_calls"
    if not isinstance(calls, list | tuple):
        raise RequestError(
            f"{where}: expected a list of calls, got {describe_type(calls)}", parameter="messages"
        )
    for position, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(
                f'{where}[{position}]: expected an object {{"function": {{"name": ..., '
                f'"arguments": ...}}}}, got {describe_type(call)}',
                parameter="messages",
            )


def _join_text_parts(content: object, index: int) -> str | None:
    """The text of a message's content; None, as a message with tool calls has, stays None.

    raises: RequestError
    """
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(
            f"messages[{index}].content: expected text or a list of parts, got "
            f"{describe_type(content)}",
            parameter="messages",
        )
    texts = []
    for part in content:
        if (
            not isinstance(part, Mapping)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            raise RequestError(
                f"messages[{index}].content may hold only parts of type text", parameter="messages"
            )
        texts.append(part["text"])
    return "".join(texts)


def spell_for_template(message: Mapping[str, object], template: str) -> dict[str, Any]:
    """A checked message as templates read it."""
    turn: dict[str, Any] = dict(message)
    if turn["role"] == "developer" and "developer" not in template:
        # OpenAI's newer name for the same; most templates leave out a role that they do not know.
        turn["role"] = "system"
    if isinstance(turn["content"], str) and takes_parts(template):
        turn["content"] = [{"type": "text", "text": turn["content"]}]
    if turn.get("reasoning_content") is None and isinstance(turn.get("reasoning"), str):
        turn["reasoning_content"] = turn["reasoning"]
    calls = turn.get("tool_calls")
    if not calls:
        # Templates ask whether a message has the key. Clients send an empty list, or null, back.
        turn.pop("tool_calls", None)
    elif isinstance(calls, list | tuple):
        turn["tool_calls"] = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": _read_arguments(call["function"].get("arguments")),
                },
            }
            for call in calls
        ]
    return turn


def _read_arguments(arguments: object) -> object:
    """Arguments as an object, which templates encode as JSON; other text does not change."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}  # what clients add up of a call without arguments
    # A model's own call may be no valid JSON: its client should be able to tell it so.
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        return value if isinstance(value, dict) else arguments
    return arguments
