"""Routers that others wrote, unchanged, before two servers with the demo model."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field
from served import Served, find_engine, serve

PORT_NAMES = ("--port", "--prometheus-port")
# By their modules: both distributions have a program `smg`.
ROUTERS = ("smg", "sglang_router")
WORDS = (
    "the little girl saw a red ball and the dog ran to it but the boy said no let us play in the "
    "park with mom"
).split()
SIZES = ("--num-pages", "1024", "--max-seq-len", "2048")
CONVERSATIONS, TURNS = 8, 4


@define
class Stream:
    """What a client of a stream has seen.

    is_whole: it has had [DONE]    error: of an event, of the response or of the connection
    """

    text: str = ""
    usage: dict[str, Any] = field(factory=dict)
    is_whole: bool = False
    error: str = ""

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that came from the prefix index."""
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))


def find_ports(count: int) -> list[int]:
    """Ports that nothing listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def route(router: str, servers: Sequence[Served], log: Path) -> Iterator[int]:
    """The port of a router before these servers, which serves."""
    ports = find_ports(len(PORT_NAMES))
    flags = [text for pair in zip(PORT_NAMES, map(str, ports), strict=True) for text in pair]
    urls = [f"http://127.0.0.1:{server.port}" for server in servers]
    launch = [sys.executable, "-m", f"{router}.launch_router"]
    command = [*launch, "--worker-urls", *urls, "--policy", "cache_aware"]
    checks = ["--health-check-interval-secs", "2", "--health-check-timeout-secs", "2"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", *flags, *checks], stdout=output, stderr=output
        )
        try:
            end = time.monotonic() + 300
            while not is_ready(ports[0]):
                assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
                time.sleep(0.2)
            yield ports[0]
        finally:
            process.kill()
            process.wait()


def is_ready(port: int) -> bool:
    """Whether a router knows a server that serves."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", "/v1/models")
        response = connection.getresponse()
        return response.status == 200 and bool(json.loads(response.read()).get("data"))
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()


def stream_chat(port: int, messages: Sequence[dict[str, str]], tokens: int = 24) -> Stream:
    """Read a streamed chat to its end, whatever that is."""
    seen = Stream()
    body = {
        "model": "demo",
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            seen.error = f"{response.status} {response.read(300)!r}"
            return seen
        for line in response:
            if not line.startswith(b"data: "):
                continue
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                seen.is_whole = True
                continue
            event = json.loads(data)
            if "error" in event:
                seen.error = f"event {event['error']}"
            seen.usage = event.get("usage") or seen.usage
            for choice in event.get("choices", ()):
                seen.text += (choice.get("delta") or {}).get("content") or ""
    except (OSError, http.client.HTTPException) as error:
        seen.error = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    return seen


def open_story(number: int) -> list[dict[str, str]]:
    """The beginning of a conversation, unlike that of any other."""
    words = (WORDS[(number * 7 + i * (number + 3)) % len(WORDS)] for i in range(90))
    return [{"role": "user", "content": f"Story {number}. {' '.join(words)}"}]


def converse(port: int, number: int) -> list[Stream]:
    """The turns of a conversation."""
    messages, turns = open_story(number), []
    for turn in range(TURNS):
        turns.append(stream_chat(port, messages))
        messages += [
            {"role": "assistant", "content": turns[-1].text},
            {"role": "user", "content": f"And then, {turn}?"},
        ]
    return turns


def converse_all(port: int) -> list[list[Stream]]:
    """All conversations at once."""
    with ThreadPoolExecutor(CONVERSATIONS) as pool:
        return list(pool.map(lambda number: converse(port, number), range(CONVERSATIONS)))


def measure_cached_share(conversations: Sequence[Sequence[Stream]]) -> float:
    """The share of later turns' prompt tokens that were cached."""
    later = [turn for turns in conversations for turn in turns[1:]]
    prompts = sum(turn.usage["prompt_tokens"] for turn in later)
    return sum(turn.cached_tokens for turn in later) / prompts


@pytest.mark.parametrize("router", ROUTERS)
def test_conversations_stay_with_their_replica_and_have_the_answers_of_one(
    router: str, tmp_path: Path
) -> None:
    with serve(*SIZES) as first, serve(*SIZES) as second, serve(*SIZES) as alone:
        with route(router, (first, second), tmp_path / "log") as port:
            found = converse_all(port)
        expected = converse_all(alone.port)
        shares = [each.metric("headstock_requests_total") for each in (first, second)]

    turns = [turn for each in found for turn in each]
    assert [turn.error for turn in turns if turn.error] == []
    assert all(turn.is_whole for turn in turns)
    assert [[turn.text for turn in each] for each in found] == [
        [turn.text for turn in each] for each in expected
    ]
    assert min(shares) > 0, "one replica had all conversations"
    assert measure_cached_share(found) >= measure_cached_share(expected) - 0.1


@pytest.mark.parametrize("killed", ["engine", "server"])
@pytest.mark.parametrize("router", ROUTERS)
def test_a_killed_replica_costs_its_own_streams_alone(
    router: str, killed: str, tmp_path: Path
) -> None:
    with (
        serve(*SIZES) as first,
        serve(*SIZES) as second,
        route(router, (first, second), tmp_path / "log") as port,
    ):
        with ThreadPoolExecutor(8) as pool:
            streams = [
                pool.submit(stream_chat, port, open_story(20 + number), 900) for number in range(8)
            ]
            end = time.monotonic() + 300
            while True:
                running = [each.metric("headstock_requests_running") for each in (first, second)]
                if sum(running) == len(streams):
                    break
                assert time.monotonic() < end, running
                time.sleep(0.05)
            assert min(running) > 0, "one replica had all streams"
            if killed == "engine":
                os.kill(find_engine(first), signal.SIGKILL)
            else:
                os.killpg(first.process.pid, signal.SIGKILL)
            seen = [each.result() for each in streams]

        whole = [each for each in seen if each.is_whole and not each.error]
        broken = [each for each in seen if not each.is_whole or each.error]
        assert len(whole) == running[1], [each.error for each in broken]
        # A server whose engine died says so. Of one that is gone, streams end without [DONE].
        assert killed == "server" or all("event" in each.error for each in broken)
        # The other replica serves what comes next.
        deadline = time.monotonic() + 120
        while True:
            later = [stream_chat(port, open_story(40 + number), 8) for number in range(6)]
            if all(each.is_whole for each in later):
                break
            assert time.monotonic() < deadline, [each.error for each in later]
            time.sleep(1)
