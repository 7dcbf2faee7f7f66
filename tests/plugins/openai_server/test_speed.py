"""What a streamed token costs the HTTP process, beside an engine that costs nothing."""

from __future__ import annotations

import os
import selectors
import time

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


@pytest.mark.full
@pytest.mark.alone
def test_a_streamed_token_costs_40_us_at_32_streams_and_300_at_one() -> None:
    with serve("--access-log", "off", script={"interval": 0.01}) as server:
        crowd = min(token_microseconds(server, 32, 3) for _ in range(3))
        alone = min(token_microseconds(server, 1, 3) for _ in range(3))
    assert (crowd <= 40, alone <= 300) == (True, True), (crowd, alone)
