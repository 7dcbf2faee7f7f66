"""A schema beside tools over HTTP: each answer is a call of a tool, or follows the schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from served import Served

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
PLACE = {"properties": {"town": {"enum": ["Oslo", "Bergen"]}}, "required": ["town"]}
SUM = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["sum"],
    "additionalProperties": False,
}
FUNCTION = {"name": "find_weather", "parameters": PLACE}
TOOL = {"type": "function", "function": FUNCTION}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM, "strict": True}}


@pytest.fixture
def server(marked: tuple[Served, dict[str, int]]) -> Served:
    return marked[0]


def prefer(server: Served, text: str) -> dict[str, Any]:
    """Sampling that begins with this text, where it may."""
    (token,) = server.post("/tokenize", {"prompt": text}).json["tokens"]
    return {"logit_bias": {str(token): 100}, "temperature": 0}


@pytest.mark.feature("W3", "W5")
def test_a_chat_is_a_call_or_follows_its_schema_whole_and_streamed(server: Served) -> None:
    body = {
        "messages": [{"role": "user", "content": "2 + 3?"}],
        "tools": [TOOL],
        "response_format": SCHEMA,
        "parallel_tool_calls": False,
        "max_tokens": 90,
    }
    for start in ("<tool_call>", "{"):
        asked = body | prefer(server, start)
        (choice,) = server.post(CHAT, asked).json["choices"]
        message, is_call = choice["message"], start == "<tool_call>"
        assert choice["finish_reason"] == ("tool_calls" if is_call else "stop")
        events = server.post(CHAT, asked | {"stream": True}).events
        deltas = [each["delta"] for event in events for each in event["choices"]]
        content = "".join(each.get("content") or "" for each in deltas)
        calls = [call["function"] for each in deltas for call in each.get("tool_calls", ())]
        arguments = "".join(each["arguments"] for each in calls)
        if is_call:
            (call,) = message["tool_calls"]
            assert call["function"]["name"] == calls[0]["name"] == "find_weather"
            assert message["content"] is None and content == ""
            assert json.loads(call["function"]["arguments"])["town"] in ("Oslo", "Bergen")
            assert arguments == call["function"]["arguments"]
        else:
            assert json.loads(message["content"]).keys() == {"sum"} and calls == []
            assert content == message["content"]


@pytest.mark.feature("W5", "W16")
def test_a_response_is_a_call_or_follows_its_schema(server: Served) -> None:
    body = {
        "input": "2 + 3?",
        "tools": [{"type": "function", **FUNCTION}],
        "text": {"format": {"type": "json_schema", "name": "sum", "schema": SUM, "strict": True}},
        "parallel_tool_calls": False,
        "max_output_tokens": 90,
    }
    for start, kind in (("<tool_call>", "function_call"), ("{", "message")):
        asked = body | prefer(server, start)
        whole = server.post(RESPONSES, asked).json
        streamed = server.post(RESPONSES, asked | {"stream": True}).named_events[-1]["response"]
        for response in (whole, streamed):
            (item,) = response["output"]
            assert response["status"] == "completed" and item["type"] == kind
            if kind == "message":
                assert json.loads(item["content"][0]["text"]).keys() == {"sum"}
            else:
                assert json.loads(item["arguments"])["town"] in ("Oslo", "Bergen")


def test_a_required_call_is_one_whatever_the_schema_of_the_text(server: Served) -> None:
    asked = {
        "messages": [{"role": "user", "content": "2 + 3?"}],
        "tools": [TOOL],
        "tool_choice": "required",
        "response_format": SCHEMA,
        "max_tokens": 90,
    }
    (choice,) = server.post(CHAT, asked).json["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["town"] in ("Oslo", "Bergen")
