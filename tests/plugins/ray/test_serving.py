"""What a Ray Serve application decides without Ray."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstock.errors import UsageError
from headstock_openai_server.api.errors import unavailable
from headstock_ray.affinity import find_session
from headstock_ray.event_tail import EventTail
from headstock_ray.exchange import AppExchange, HttpHead, HttpRequest
from headstock_ray.layout import split_arguments

LOST = unavailable("the replica was lost; send the request again", "replica_lost")
TURNS = st.lists(st.text(max_size=20), min_size=1, max_size=4)


def chat(*texts: str, **fields: Any) -> bytes:
    """A chat of a system message and turns of the user and the assistant, in turn."""
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return json.dumps(
        {"messages": [{"role": "system", "content": "Hi"}, *turns], **fields}
    ).encode()


@given(TURNS, TURNS)
def test_later_turns_of_a_conversation_have_its_session(first: list[str], more: list[str]) -> None:
    session = find_session([], chat(first[0]))

    assert session and find_session([], chat(*first, *more, temperature=1)) == session
    assert find_session([], chat(first[0] + "!", *more)) != session


def test_a_header_and_a_key_name_a_session_before_its_turns() -> None:
    header = [(b"X-Session-Id", b"one")]
    key = chat("a", prompt_cache_key="k")

    assert find_session(header, chat("a")) == find_session(header, chat("b"))
    assert find_session([], key) == find_session([], chat("b", prompt_cache_key="k"))
    assert len({find_session(header, key), find_session([], key), find_session([], chat("a"))}) == 3


def test_a_response_has_the_session_of_its_input() -> None:
    alone = json.dumps({"input": "Hello"}).encode()
    later = json.dumps(
        {"input": [{"role": "user", "content": "Hello"}, {"role": "user", "content": "More"}]}
    ).encode()
    assert find_session([], alone) == find_session([], later) != ""


@given(st.binary(max_size=30) | st.from_regex(rb'\{"(messages|input|prompt)":.{0,20}\}'))
def test_any_other_body_has_no_session_or_one_and_never_an_error(body: bytes) -> None:
    assert len(find_session([], body)) in (0, 32)


def test_a_stream_of_a_chat_ends_with_an_error_and_done() -> None:
    tail = EventTail()
    tail.read_head(HttpHead(200, [(b"content-type", b"text/event-stream; charset=utf-8")]))
    tail.read_piece(b'data: {"choices":[{"delta":{"content":"\\"sequence_number\\":7"}}]}\n\n')

    error, done = tail.write_error(LOST).decode().removesuffix("\n\n").split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert done == "data: [DONE]"


def test_a_stream_of_a_response_ends_with_the_response_that_failed() -> None:
    tail = EventTail()
    tail.read_head(HttpHead(200, [(b"content-type", b"text/event-stream")]))
    created = {"type": "response.created", "sequence_number": 0, "response": {"id": "resp_1"}}
    delta = {"type": "response.output_text.delta", "sequence_number": 4, "delta": "a"}
    for event in (created, delta):
        data = json.dumps(event, separators=(",", ":"))
        tail.read_piece(f"event: {event['type']}\ndata: {data}\n\n".encode())

    name, data = tail.write_error(LOST).decode().split("\n")[:2]
    event = json.loads(data.removeprefix("data: "))
    assert name == f"event: {event['type']}" == "event: response.failed"
    assert event["sequence_number"] == 5
    assert event["response"]["id"] == "resp_1" and event["response"]["status"] == "failed"
    assert event["response"]["error"]["code"] == "replica_lost"


def test_a_body_that_is_no_stream_of_events_is_not_taken_for_one() -> None:
    tail = EventTail()
    tail.read_head(HttpHead(200, [(b"content-type", b"application/json")]))
    assert not tail.is_events


REQUEST = HttpRequest("POST", "/v1", b"", [(b"a", b"b")], ("127.0.0.1", 1), b"body")


def test_a_replica_gives_what_the_application_sends() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["path"] == "/v1" and scope["headers"] == [(b"a", b"b")]
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 201, "headers": []})
        for number in range(3):
            await send({"type": "http.response.body", "body": body, "more_body": number < 2})
            await asyncio.sleep(0)

    async def read() -> list[HttpHead | bytes]:
        return [part async for part in AppExchange(app, REQUEST).read()]

    head, *pieces = asyncio.run(read())
    assert head == HttpHead(201, [])
    assert b"".join(each for each in pieces if isinstance(each, bytes)) == b"body" * 3


def test_the_application_hears_that_the_client_has_gone() -> None:
    heard = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        heard.extend([await receive(), await receive()])

    async def leave() -> None:
        parts = AppExchange(app, REQUEST).read()
        await anext(parts)
        await parts.aclose()

    asyncio.run(leave())
    assert [each["type"] for each in heard] == ["http.request", "http.disconnect"]


def test_arguments_are_flags_of_the_server_but_for_the_layout() -> None:
    layout, flags = split_arguments(
        {
            "model": "demo",
            "replicas": "3",
            "autoscaling": '{"min_replicas": 1}',
            "tp": 2,
            "debug_ops": True,
            "quiet": False,
            "served_model_name": ["a", "b"],
        }
    )

    assert (layout.replicas, layout.autoscaling) == (3, {"min_replicas": 1})
    assert flags == [
        *("--model=demo", "--tp=2", "--debug-ops"),
        *("--served-model-name=a", "--served-model-name=b"),
    ]


@pytest.mark.parametrize(
    "arguments",
    [{"port": 8000}, {"replicas": "two"}, {"autoscaling": "{1"}, {"replica_resources": 3}],
)
def test_arguments_that_no_application_can_have_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(arguments))):
        split_arguments(arguments)
