"""Anthropic's own client, unchanged, against a server with the demo model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from served import Served, serve
from tool_caller import serve_caller

KEY = "secret"
QUESTION: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]


def connect(server: Served, **options: Any) -> anthropic.Anthropic:
    url = f"http://127.0.0.1:{server.port}"
    return anthropic.Anthropic(base_url=url, max_retries=0, **{"api_key": KEY, **options})


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serve("--num-pages", "256", key=KEY) as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[anthropic.Anthropic]:
    with connect(server) as client:
        yield client


@pytest.mark.feature("W18")
@pytest.mark.parametrize(
    ("question", "fields", "reason"),
    [
        ("What is 2 + 3?", {}, "end_turn"),
        ("Tell a story.", {"stop_sequences": ["time"]}, "stop_sequence"),
        ("Tell a story.", {"extra_body": {"temperature": 0.0, "top_k": 5}}, "max_tokens"),
    ],
)
def test_a_streamed_message_is_the_whole_message(
    client: anthropic.Anthropic, question: str, fields: dict[str, Any], reason: str
) -> None:
    system: Any = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 20, "system": system}
    asked |= {"messages": [{"role": "user", "content": question}], **fields}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert {"message_start", "content_block_delta", "text", "message_stop"} <= kinds
    assert final.stop_reason == whole.stop_reason == reason
    assert [each.text for each in final.content] == [each.text for each in whole.content]
    assert final.usage.output_tokens == whole.usage.output_tokens
    del asked["max_tokens"]
    counted = client.messages.count_tokens(
        **{name: asked[name] for name in ("model", "system", "messages")}
    )
    used = whole.usage
    assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)


def test_errors_are_the_clients_own_kinds(client: anthropic.Anthropic, server: Served) -> None:
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 5, "messages": QUESTION}
    with pytest.raises(anthropic.NotFoundError, match="served: demo") as missing:
        client.messages.create(**asked | {"model": "claude-x"})
    assert missing.value.type == "not_found_error" and missing.value.request_id
    image: Any = {"type": "base64", "media_type": "image/png", "data": ""}
    turn = {"role": "user", "content": [{"type": "image", "source": image}]}
    with pytest.raises(anthropic.BadRequestError, match="image is not supported"):
        client.messages.create(**asked | {"messages": [turn]})
    with connect(server, api_key="wrong") as wrong, pytest.raises(anthropic.AuthenticationError):
        wrong.messages.create(**asked)
    with connect(server, api_key=None, auth_token=KEY) as bearer:
        assert [model.id for model in bearer.models.list()] == ["demo"]


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[anthropic.Anthropic]:
    """A client of a server whose model thinks and calls a tool."""
    folder = tmp_path_factory.mktemp("tools")
    with serve_caller(folder) as served, connect(served) as client:
        yield client


ASKED: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 200,
    "tools": [
        {
            "name": "add",
            "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
        }
    ],
}


@pytest.mark.feature("W18")
def test_a_tool_is_used_and_its_result_taken(caller: anthropic.Anthropic) -> None:
    thinks: Any = {"type": "enabled", "budget_tokens": 1024}
    first = caller.messages.create(messages=QUESTION, thinking=thinks, **ASKED)
    thinking, text, use = first.content
    assert first.stop_reason == "tool_use"
    assert (thinking.thinking, text.text) == ("Hm.", "I add.")
    assert (use.type, use.name, use.input) == ("tool_use", "add", {"a": 2})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "5"}
    history: Any = [
        *QUESTION,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    with caller.messages.stream(messages=history, **ASKED) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert {"thinking", "text", "input_json", "signature"} <= kinds
    assert [each.type for each in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[-1].input == {"a": 2}
    assert final.usage.input_tokens > first.usage.input_tokens
    off: Any = {"type": "disabled"}
    plain = caller.messages.create(messages=history, thinking=off, **ASKED)
    assert [each.type for each in plain.content] == ["text", "tool_use"]


def test_the_tool_runner_calls_functions(caller: anthropic.Anthropic) -> None:
    called = []

    @anthropic.beta_tool
    def add(a: int) -> str:
        """Add.

        Args:
            a: A number.
        """
        called.append(a)
        return "5"

    runner = caller.beta.messages.tool_runner(
        model="demo", max_tokens=200, tools=[add], messages=QUESTION, max_iterations=2
    )
    assert [message.stop_reason for message in runner] == ["tool_use", "tool_use"]
    assert called[0] == 2
