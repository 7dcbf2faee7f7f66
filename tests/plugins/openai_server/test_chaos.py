"""A server with the demo model while parts of it are killed, stopped, slowed or full.

docs/serving.md has the outcome of each.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from served import Answer, Served, find_engine, read_until_closed, serve, split_events

TEXT = "/v1/completions"
STREAM = {"prompt": "Once", "max_tokens": 300, "ignore_eos": True, "stream": True}


def health(server: Served) -> tuple[int, str]:
    answer = server.get("/health")
    return answer.status, answer.json["status"]


def wait_until(condition: Callable[[], bool], seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def finish(stream: socket.socket, read: bytes = b"") -> list[dict[str, Any]]:
    """The events of a stream of which `read` has been read; it is closed."""
    with stream:
        return split_events(read + read_until_closed(stream))


def start_streams(
    server: Served, count: int, **fields: object
) -> list[tuple[socket.socket, bytes]]:
    """Streams that have begun, and what was read of each."""
    streams = [server.post_raw(TEXT, STREAM | fields) for _ in range(count)]
    return [(stream, stream.recv(20)) for stream in streams]


@pytest.mark.feature("W9")
@pytest.mark.full
def test_a_killed_engine_process_fails_what_runs_and_ends_the_server_with_70() -> None:
    with serve("--num-pages", "128", "--drain-delay", "1") as server:
        streams = start_streams(server, 4)
        os.kill(find_engine(server), signal.SIGKILL)
        for stream, read in streams:
            *_, last = finish(stream, read)
            assert last["error"]["message"] == "the engine has stopped"
        assert health(server) == (503, "engine_dead")
        assert server.wait() == 70
    assert "the engine process ended" in server.errors[-1]


@pytest.mark.feature("W9")
@pytest.mark.full
def test_an_engine_whose_scheduler_fails_says_so_and_ends_the_server_with_70() -> None:
    with serve("--num-pages", "128", "--drain-delay", "1", faults=("schedule@4",)) as server:
        *some, last = server.post(TEXT, STREAM).events
        assert some and last["error"]["message"] == "the engine has stopped"
        assert health(server) == (503, "engine_dead")
        assert server.wait() == 70
    assert server.errors[-1].startswith("the engine stopped: the scheduler 'mixed' raised")


@pytest.mark.full
def test_an_engine_process_that_is_stopped_for_ten_seconds_goes_on() -> None:
    with serve("--num-pages", "128", "--watchdog", "3") as server:
        streams = start_streams(server, 4, max_tokens=60)
        engine = find_engine(server)
        os.kill(engine, signal.SIGSTOP)
        began = time.monotonic()
        wait_until(lambda: health(server) == (503, "engine_stalled"), 9)
        # What comes now waits, and is not refused.
        late: list[Answer] = []
        body = {"prompt": "23 + 48 =", "max_tokens": 4, "temperature": 0}
        asker = threading.Thread(target=lambda: late.append(server.post(TEXT, body)))
        asker.start()
        time.sleep(max(0.0, 10 - (time.monotonic() - began)))
        os.kill(engine, signal.SIGCONT)
        for stream, read in streams:
            *_, last = finish(stream, read)
            assert last["choices"][0]["finish_reason"] == "length"
        asker.join(600)
        assert late[0].json["choices"][0]["text"].startswith(" 71")
        wait_until(lambda: health(server) == (200, "ok"))
        server.wait_for("headstock_kv_pages_live", 0)


@pytest.mark.feature("W9")
@pytest.mark.full
def test_a_step_that_takes_seconds_delays_tokens_and_changes_none() -> None:
    body = STREAM | {"max_tokens": 40, "temperature": 0}
    with serve("--num-pages", "128", "--watchdog", "1", faults=("slow@20:3",)) as server:
        began = time.monotonic()
        stream = server.post_raw(TEXT, body)
        wait_until(lambda: health(server) == (503, "engine_stalled"), 20)
        slow = finish(stream)
        assert time.monotonic() - began > 3
        wait_until(lambda: health(server) == (200, "ok"))
        again = server.post(TEXT, body).events
    texts = ["".join(each["choices"][0]["text"] for each in run) for run in (slow, again)]
    assert texts[0] == texts[1] and len(texts[0]) > 40


@pytest.mark.feature("W9")
@pytest.mark.full
def test_a_full_disk_ends_the_recording_and_no_request() -> None:
    with serve("--num-pages", "128", "--record", "/dev/full", "--record-overwrite") as server:
        body = {"prompt": "23 + 48 =", "max_tokens": 4, "temperature": 0}
        assert server.post(TEXT, body).json["choices"][0]["text"].startswith(" 71")
        wait_until(lambda: any("recording stopped" in line for line in server.errors))
        assert any("No space left on device" in line for line in server.errors)
        assert server.post(TEXT, body).status == 200
        assert health(server) == (200, "ok")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.feature("W9")
@pytest.mark.full
def test_a_full_disk_ends_the_access_log_and_no_request() -> None:
    with serve("--num-pages", "128", "--access-log", "/dev/full") as server:
        for _ in range(2):
            assert server.post(TEXT, {"prompt": "a", "max_tokens": 1}).status == 200
        assert sum("the access log ends" in line for line in server.errors) == 1


@pytest.mark.feature("W9")
@pytest.mark.full
def test_sigterm_under_load_ends_every_stream_whole() -> None:
    limits = ("--num-pages", "256", "--max-running-requests", "8", "--drain-timeout", "120")
    with serve(*limits) as server:
        # more than run at once: those that wait are served too
        streams = [server.post_raw(TEXT, STREAM | {"max_tokens": 60}) for _ in range(24)]
        wait_until(lambda: server.metric("headstock_output_tokens_total") > 20)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: is_closed(server))
        for stream in streams:
            events = finish(stream)
            assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert server.wait(600) == 0
    assert not any("level=error" in line for line in server.errors)


def is_closed(server: Served) -> bool:
    """Whether the server takes no more connections."""
    with contextlib.suppress(ConnectionError), server.connect():
        return False
    return True


def resident_kib(process: int) -> int:
    with open(f"/proc/{process}/status") as file:
        (line,) = (line for line in file if line.startswith("VmRSS"))
    return int(line.split()[1])


def count_descriptors(process: int) -> int:
    return len(os.listdir(f"/proc/{process}/fd"))


def reset(connection: socket.socket) -> None:
    """Close a connection by a reset in place of an end."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def disturb(server: Served, rng: random.Random) -> None:
    """500 connections that are opened and reset, 50 streams that are dropped at random points, and
    200 headers that stop in their middle.
    """
    for index in range(500):
        data = (b"", b"GET /hea", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")[index % 3]
        reset(server.connect(data))
    halves = [
        server.connect(b"GET /health HTTP/1.1\r\nhost: x\r\n"[: 1 + i % 30]) for i in range(200)
    ]
    for _ in range(5):
        streams = [server.post_raw(TEXT, STREAM) for _ in range(10)]
        for stream in streams:
            for _ in range(rng.randrange(6)):
                stream.recv(rng.randrange(1, 400))
            if rng.random() < 0.5:
                reset(stream)
            else:
                stream.close()
    for half in halves:
        assert read_until_closed(half) == b""
        half.close()


@pytest.mark.feature("W9")
@pytest.mark.full
def test_clients_that_come_and_go_leave_nothing_behind() -> None:
    rng = random.Random(5)
    with serve("--num-pages", "512", "--header-timeout", "1", "--access-log", "off") as server:
        processes = (server.process.pid, find_engine(server))
        sizes = []
        for _ in range(4):
            disturb(server, rng)
            for name in ("requests_running", "requests_waiting", "kv_pages_live"):
                server.wait_for(f"headstock_{name}", 0)
            server.wait_for("headstock_http_requests_open", 1)
            gc.collect()
            facts = [(resident_kib(each), count_descriptors(each)) for each in processes]
            sizes.append(facts)
        assert server.post(TEXT, {"prompt": "a", "max_tokens": 1}).status == 200
    for place in range(2):
        (_, _), (kib, files), *_, (last_kib, last_files) = (round[place] for round in sizes)
        assert last_files <= files + 2, sizes
        assert last_kib < kib + 4096, sizes
    assert not any("level=error" in line for line in server.errors)
