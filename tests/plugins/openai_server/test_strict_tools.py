"""Strict tools over HTTP: each API lets an answer be text, or calls that follow their schemas."""

from __future__ import annotations

import json
from typing import Any

import pytest
from served import Served

CHAT, RESPONSES, MESSAGES, OLLAMA = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
)
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"town": {"enum": ["Oslo", "Bergen"]}, "days": {"type": "boolean"}},
    "required": ["town", "days"],
    "additionalProperties": False,
}
ASKED = [{"role": "user", "content": "Once upon a time"}]


def make_tool(path: str, schema: dict[str, Any], *, strict: bool = True) -> dict[str, Any]:
    """A tool in the form of this route."""
    function = {"name": "find_weather", "parameters": schema, "strict": strict}
    if path == MESSAGES:
        return {"name": "find_weather", "input_schema": schema, "strict": strict}
    if path == RESPONSES:
        return {"type": "function", **function}
    return {"type": "function", "function": function}


def make_body(path: str, schema: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A request with one tool."""
    key = "max_output_tokens" if path == RESPONSES else "max_tokens"
    length = {"options": {"num_predict": 60}, "stream": False} if path == OLLAMA else {key: 60}
    messages = {"input" if path == RESPONSES else "messages": ASKED}
    tools = [make_tool(path, schema, strict=changes.pop("strict", True))]
    return {"model": "demo", "tools": tools, **messages, **length, **changes}


@pytest.mark.feature("W3", "W5")
def test_a_chat_calls_as_the_schema_says_whole_and_streamed(
    marked: tuple[Served, dict[str, int]],
) -> None:
    server, ids = marked
    likes = {"logit_bias": {str(ids["<tool_call>"]): 100}, "temperature": 0}
    asked = make_body(CHAT, PLACE, parallel_tool_calls=False)
    (text,) = server.post(CHAT, asked | {"temperature": 0}).json["choices"]
    assert text["message"]["content"] and "tool_calls" not in text["message"]

    (choice,) = server.post(CHAT, asked | likes).json["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert arguments.keys() == {"town", "days"} and arguments["town"] in ("Oslo", "Bergen")
    events = server.post(CHAT, asked | likes | {"stream": True}).events
    deltas = [each["delta"] for event in events for each in event["choices"]]
    calls = [call["function"] for each in deltas for call in each.get("tool_calls", ())]
    assert calls[0]["name"] == "find_weather"
    assert "".join(each["arguments"] for each in calls) == call["function"]["arguments"]


@pytest.mark.feature("W3", "W16")
def test_a_response_calls_as_the_schema_says(marked: tuple[Served, dict[str, int]]) -> None:
    server, ids = marked
    likes = {"logit_bias": {str(ids["<tool_call>"]): 100}, "temperature": 0}
    asked = make_body(RESPONSES, PLACE, parallel_tool_calls=False) | likes
    whole = server.post(RESPONSES, asked).json
    streamed = server.post(RESPONSES, asked | {"stream": True}).named_events[-1]["response"]
    for response in (whole, streamed):
        (item,) = response["output"]
        assert item["type"] == "function_call" and json.loads(item["arguments"]).keys() == {
            "town",
            "days",
        }


UNSERVED = PLACE | {"properties": {"town": {"not": {"const": "Rome"}}, "days": {"type": "boolean"}}}


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, OLLAMA])
def test_each_api_follows_strict_and_refuses_what_cannot_be_followed(
    marked: tuple[Served, dict[str, int]], path: str
) -> None:
    server, _ = marked
    assert server.post(path, make_body(path, PLACE)).status == 200
    for stream in (False, True):
        refused = server.post(path, make_body(path, UNSERVED, stream=stream))
        assert refused.status == 400
        error = refused.json["error"]
        message = error if isinstance(error, str) else error["message"]
        assert message.startswith("tools: strict tools cannot be served by llguidance")
    assert server.post(path, make_body(path, UNSERVED, strict=False)).status == 200


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, OLLAMA])
def test_each_api_refuses_open_objects_as_its_own_does(
    marked: tuple[Served, dict[str, int]], path: str
) -> None:
    server, _ = marked
    is_open = {name: value for name, value in PLACE.items() if name != "additionalProperties"}
    answer = server.post(path, make_body(path, is_open))
    assert answer.status == 400 and b"is not strict: add additionalProperties" in answer.body
    # Anthropic's takes optional properties.
    answer = server.post(path, make_body(path, PLACE | {"required": ["town"]}))
    assert answer.status == (200 if path == MESSAGES else 400)
