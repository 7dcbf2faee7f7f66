"""`headstock serve` as a Ray Serve application, on a cluster whose nodes one machine plays.

The first node has the ingress alone, so that each of the others can be lost.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import patience
import pytest
import ray
from attrs import define, field
from ray.cluster_utils import Cluster
from ray_cluster import describe_node, find_processes, serve, start_cluster, wait_for

from headstock_ray.serve_app import build

pytestmark = pytest.mark.filterwarnings("default")  # Ray's own are not ours

SETTINGS: dict[str, Any] = {
    "model": "demo",
    "device": "cpu",
    "num_pages": 2048,
    "max_seq_len": 4096,
    "drain_timeout": 600,
    "ingress_resources": {"resources": {"front": 0.001}},
}


@define
class Stream:
    """What a client of a stream has seen."""

    replica: str = ""
    status: int = 0
    text: str = ""
    cached_tokens: int = 0
    prompt_tokens: int = 0
    is_whole: bool = False
    error: dict[str, Any] = field(factory=dict)
    begun: threading.Event = field(factory=threading.Event)


@define
class Application:
    """The application that serves, and its cluster.   log: the access log of all replicas"""

    cluster: Cluster
    port: int
    log: Path

    def deploy(self, **arguments: Any) -> None:
        """Serve with these arguments, in place of those before."""
        settings = SETTINGS | {"access_log": str(self.log)} | arguments
        serve.run(build(settings), name="headstock", blocking=False)

    def chat(
        self,
        messages: list[dict[str, str]],
        tokens: int,
        session: str = "",
        stream: Stream | None = None,
    ) -> Stream:
        """Read a streamed chat to its end, whatever that is."""
        seen = stream or Stream()
        body = {
            "messages": messages,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        headers = {"content-type": "application/json"} | (
            {"x-session-id": session} if session else {}
        )
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=patience.seconds)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        seen.status, seen.replica = response.status, response.headers.get("x-replica", "")
        for line in response:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                seen.is_whole = True
                continue
            event = json.loads(line.removeprefix(b"data: "))
            seen.error = event.get("error") or seen.error
            usage = event.get("usage") or {}
            seen.prompt_tokens = usage.get("prompt_tokens", 0)
            seen.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            for choice in event.get("choices", ()):
                seen.text += choice["delta"].get("content") or ""
            seen.begun.set()
        connection.close()
        return seen

    def find_sessions(self, count: int, replicas: int) -> dict[str, list[str]]:
        """For each of so many replicas, the names of sessions that it has."""
        found: dict[str, list[str]] = {}
        end = time.monotonic() + patience.seconds
        number = 0
        while len(found) < replicas or min(map(len, found.values())) < count:
            assert time.monotonic() < end, found
            number += 1
            seen = self.chat([{"role": "user", "content": "Hi"}], 1, f"session {number}")
            if seen.is_whole and not seen.error:
                found.setdefault(seen.replica, []).append(f"session {number}")
        return {replica: names[:count] for replica, names in found.items()}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    """Two replicas, each on a node of its own."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with start_cluster(0, 1, 1, resources={"front": 1}) as cluster:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        found = Application(cluster, port, tmp_path_factory.mktemp("serve") / "log")
        found.deploy(replicas=2)
        yield found
        serve.shutdown()


def stream_all(app: Application, sessions: list[str], tokens: int) -> list[Stream]:
    """Streams of all sessions, each of which has begun."""
    streams = [Stream() for _ in sessions]
    pool = ThreadPoolExecutor(len(sessions))
    for name, stream in zip(sessions, streams, strict=True):
        pool.submit(app.chat, [{"role": "user", "content": name}], tokens, name, stream)
    assert all(each.begun.wait(patience.seconds) for each in streams)
    pool.shutdown(wait=False)
    return streams


def find_engines() -> list[int]:
    """The engine processes of replicas."""
    return find_processes(lambda line: b"headstock_openai_server.engine.process_main" in line)


def wait_whole(streams: list[Stream]) -> None:
    """Wait until all streams have ended."""
    wait_for(lambda: all(each.is_whole for each in streams), "a stream has not ended")


def test_conversations_stay_with_their_replica(app: Application) -> None:
    def converse(number: int) -> list[Stream]:
        messages = [{"role": "user", "content": f"Story {number}: the dog ran to the park. " * 5}]
        turns = []
        for turn in range(3):
            turns.append(app.chat(messages, 16))
            messages += [
                {"role": "assistant", "content": turns[-1].text},
                {"role": "user", "content": f"And then, {turn}?"},
            ]
        return turns

    app.find_sessions(1, 2)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(converse, range(16)))

    assert all(turn.is_whole and not turn.error for turns in found for turn in turns)
    assert [len({turn.replica for turn in turns}) for turns in found] == [1] * 16
    assert len({turns[0].replica for turns in found}) == 2
    later = [turn for turns in found for turn in turns[1:]]
    cached = sum(turn.cached_tokens for turn in later) / sum(turn.prompt_tokens for turn in later)
    assert cached > 0.6


def test_a_lost_node_costs_its_own_streams_alone_and_the_replica_comes_back(
    app: Application,
) -> None:
    sessions = app.find_sessions(3, 2)
    streams = stream_all(app, [name for names in sessions.values() for name in names], 1500)
    app.cluster.remove_node(app.cluster.list_all_nodes()[-1], allow_graceful=False)
    wait_whole(streams)

    lost = {each.replica for each in streams if each.error}
    assert len(lost) == 1 and lost < sessions.keys()
    for each in streams:
        assert each.status == 200
        assert each.error.get("code") == ("replica_lost" if each.replica in lost else None)
    app.cluster.add_node(**describe_node(1))
    assert not lost & app.find_sessions(1, 2).keys()


def test_a_replica_whose_engine_died_costs_its_own_streams_and_is_replaced(
    app: Application,
) -> None:
    sessions = app.find_sessions(2, 2)
    streams = stream_all(app, [name for names in sessions.values() for name in names], 1500)
    os.kill(find_engines()[0], signal.SIGKILL)
    wait_whole(streams)

    lost = {each.replica for each in streams if each.error}
    assert len(lost) == 1
    for each in streams:
        text = "the engine has stopped" if each.replica in lost else None
        assert each.error.get("message") == text
    wait_for(lambda: not lost & app.find_sessions(1, 1).keys(), "the replica is still there")
    wait_for(lambda: len(find_engines()) == 2, "no other has come")


def test_streams_of_a_replica_that_is_taken_away_end_whole(app: Application) -> None:
    sessions = app.find_sessions(2, 2)
    streams = stream_all(app, [name for names in sessions.values() for name in names], 600)
    app.deploy(replicas=1)
    wait_whole(streams)

    assert [each.error for each in streams] == [{}] * 4
    assert {each.replica for each in streams} == sessions.keys()
    wait_for(lambda: ray.available_resources().get("CPU") == 1, "the replica is still there")


def test_a_client_that_leaves_stops_its_request(app: Application) -> None:
    app.find_sessions(1, 1)
    body = {"prompt": "Once", "max_tokens": 4000, "stream": True, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", app.port, timeout=patience.seconds)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    response.close()
    connection.close()

    def find_line() -> dict[str, Any] | None:
        lines = map(json.loads, app.log.read_text().splitlines())
        return next((line for line in lines if line["path"] == "/v1/completions"), None)

    wait_for(find_line, "the request has not ended")
    line = find_line()
    assert line is not None and line["completion_tokens"] < 4000


def test_load_brings_a_replica_and_its_end_takes_it_away(app: Application) -> None:
    quick = {"upscale_delay_s": 1, "downscale_delay_s": 3, "metrics_interval_s": 1}
    automatic = {"min_replicas": 1, "target_ongoing_requests": 2, "look_back_period_s": 3}
    app.deploy(replicas=2, autoscaling=automatic | quick)
    app.find_sessions(1, 1)
    is_enough = threading.Event()

    def load(number: int) -> list[Stream]:
        seen = []
        while not is_enough.is_set():
            seen.append(app.chat([{"role": "user", "content": f"{number}"}], 400))
        return seen

    with ThreadPoolExecutor(6) as pool:
        try:
            loads = [pool.submit(load, number) for number in range(6)]
            wait_for(lambda: ray.available_resources().get("CPU", 0) == 0, "no replica has come")
        finally:
            is_enough.set()
        streams = [stream for each in loads for stream in each.result()]

    assert all(each.is_whole and not each.error for each in streams)
    wait_for(lambda: ray.available_resources().get("CPU") == 1, "no replica has gone")
