"""What a streamed token costs the HTTP process, and what many clients cost one another."""

from __future__ import annotations

import os
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from served import Served, serve

BODY = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 4000,
    "stream": True,
}
TOKENS = "headstock_inter_token_latency_seconds_count"


def processor_seconds(process: int) -> float:
    with open(f"/proc/{process}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def token_microseconds(server: Served, streams: int, seconds: float) -> float:
    """Processor time of the server for each token of `streams` streams, in microseconds."""
    with selectors.DefaultSelector() as selector:
        connections = [server.post_raw("/v1/chat/completions", BODY) for _ in range(streams)]
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
            connection.recv(1 << 16)
        tokens, spent = server.metric(TOKENS), processor_seconds(server.process.pid)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for key, _ in selector.select(0.1):
                key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
        spent = processor_seconds(server.process.pid) - spent
        tokens = server.metric(TOKENS) - tokens
    for connection in connections:
        connection.close()
    server.wait_for("headstock_requests_running", 0)
    return 1e6 * spent / tokens


BARE = Path(__file__).parents[2] / "support" / "bare_server.py"


@contextmanager
def serve_bare() -> Iterator[tuple[int, int]]:
    """The process and the port of a server that streams chunks and does nothing else."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with subprocess.Popen([sys.executable, str(BARE), str(port)]) as process:
        try:
            yield process.pid, port
        finally:
            process.terminate()


def connect(port: int) -> socket.socket:
    """A connection, as soon as something listens."""
    end = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.05)


def chunk_microseconds(process: int, port: int, streams: int, seconds: float) -> float:
    """Processor time of the bare server for each chunk of `streams` streams, in microseconds."""
    with selectors.DefaultSelector() as selector:
        connections = [connect(port) for _ in range(streams)]
        for connection in connections:
            connection.sendall(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
            selector.register(connection, selectors.EVENT_READ)
            connection.recv(1 << 16)
        chunks, spent = 0, processor_seconds(process)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for key, _ in selector.select(0.1):
                chunks += key.fileobj.recv(1 << 16).count(b"data:")  # type: ignore[union-attr]
        spent = processor_seconds(process) - spent
    for connection in connections:
        connection.close()
    return 1e6 * spent / chunks


@pytest.mark.feature("W14")
@pytest.mark.full
@pytest.mark.alone
def test_a_streamed_token_costs_little_more_than_a_chunk_does() -> None:
    """At most 40 us at 32 streams and 300 at one, on a machine on which uvicorn and Starlette alone
    take 15 and 140 for a chunk; others differ by a factor of two.
    """
    ratios: dict[int, list[float]] = {32: [], 1: []}
    costs = []
    with serve("--access-log", "off", script={"interval": 0.01}) as server, serve_bare() as bare:
        for _ in range(3):
            for streams, found in ratios.items():
                token = token_microseconds(server, streams, 3)
                chunk = chunk_microseconds(*bare, streams, 3)
                found.append(token / chunk)
                costs.append((streams, round(token), round(chunk)))
    assert (min(ratios[32]) <= 40 / 15, min(ratios[1]) <= 300 / 140) == (True, True), costs


CONCURRENCY = (1, 8, 32, 64)
WHOLE = {"prompt": "Once upon a time", "max_tokens": 64, "ignore_eos": True}


def throughput(server: Served, clients: int) -> float:
    """Tokens a second of `clients` that each ask again when they are answered, over 4 seconds."""
    end = time.monotonic() + 4

    def ask(number: int) -> None:
        while time.monotonic() < end:
            # A prompt of its own, or the index would have it.
            prompt = f"{number} {time.monotonic_ns()} {WHOLE['prompt']}"
            assert server.post("/v1/completions", WHOLE | {"prompt": prompt}).status == 200

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    before, began = server.metric("headstock_output_tokens_total"), time.monotonic()
    for thread in threads:
        thread.start()
    time.sleep(max(0.0, end - time.monotonic()))
    tokens, seconds = server.metric("headstock_output_tokens_total"), time.monotonic() - began
    for thread in threads:
        thread.join()
    return (tokens - before) / seconds


@pytest.mark.feature("W14")
@pytest.mark.full
@pytest.mark.alone
def test_more_clients_never_cost_more_than_a_twentieth_of_the_throughput() -> None:
    with serve("--num-pages", "2048", "--max-running-requests", "64") as server:
        throughput(server, 8)  # warm
        turns = [[throughput(server, clients) for clients in CONCURRENCY] for _ in range(3)]
    rates = [statistics.median(of) for of in zip(*turns, strict=True)]
    best = 0.0
    for rate in rates:
        assert rate >= 0.95 * best, dict(zip(CONCURRENCY, rates, strict=True))
        best = max(best, rate)
