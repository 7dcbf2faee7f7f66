"""Ranks that something else has started, as torchrun does, find each other and say who they are."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import patience
import pytest

from headstock.errors import CannotRun, UsageError
from headstock_multiprocess.rendezvous import (
    SECRET,
    Placement,
    accept_ranks,
    connect_to_leader,
    open_listener,
    read_placement,
)

PROMPT = "Once upon a time"
RUN = ("--device", "cpu", "--prompt", PROMPT, "--max-tokens", "24", "--temperature", "0", "--json")
SIZES = ("--num-pages", "64", "--max-seq-len", "256")


def find_port() -> int:
    """A port with a free one behind it, which rank 0 will listen on."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return port


def start(
    rank: int,
    port: int,
    *arguments: str,
    address: str = "127.0.0.1",
    before: Sequence[str] = (),
    secret: str = "",
) -> subprocess.Popen[str]:
    """A process of `headstock run --tp 2`, as torchrun would start it."""
    variables = {
        "RANK": f"{rank}",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": address,
        "MASTER_PORT": f"{port}",
        "OMP_NUM_THREADS": "1",
        SECRET: secret,
    }
    return subprocess.Popen(
        [*before, sys.executable, "-m", "headstock", "run", *RUN, *SIZES, "--tp", "2", *arguments],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_alone() -> dict[str, Any]:
    """The answer of one rank."""
    command = [sys.executable, "-m", "headstock", "run", *RUN, *SIZES]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """The exit code of a process, and what it has written."""
    try:
        out, errors = process.communicate(timeout=600)
    finally:
        process.kill()
    return process.returncode, out, errors


@pytest.mark.full
@pytest.mark.feature("S19")
def test_ranks_that_are_started_apart_answer_as_one() -> None:
    port = find_port()
    other, first = start(1, port), start(0, port)
    code, out, errors = finish(first)

    assert code == 0, errors
    assert json.loads(out)["text"] == run_alone()["text"]
    code, out, errors = finish(other)
    assert (code, out) == (0, ""), errors


@pytest.fixture
def networks() -> Iterator[tuple[Sequence[str], Sequence[str]]]:
    """What runs a command in the first, and in the second, of two joined network namespaces."""
    name = f"hs{secrets.token_hex(3)}"
    namespaces = [f"{name}a", f"{name}b"]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=600)

    try:
        for each in namespaces:
            ip("netns", "add", each)
        ip("link", "add", f"{name}x", "netns", namespaces[0], "type", "veth", "peer", "name",
           f"{name}y", "netns", namespaces[1])  # fmt: skip
        for each, end, host in zip(namespaces, "xy", (1, 2), strict=True):
            ip("-n", each, "addr", "add", f"10.77.0.{host}/24", "dev", f"{name}{end}")
            ip("-n", each, "link", "set", f"{name}{end}", "up")
            ip("-n", each, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this machine lets nobody make network namespaces")
    try:
        yield tuple(("ip", "netns", "exec", each) for each in namespaces)  # type: ignore[misc]
    finally:
        for each in namespaces:
            subprocess.run(["ip", "netns", "del", each], check=False, timeout=600)


@pytest.mark.full
def test_ranks_of_two_hosts_answer_as_one(
    networks: tuple[Sequence[str], Sequence[str]],
) -> None:
    secret = secrets.token_hex(16)
    processes = [
        start(rank, 29_500, address="10.77.0.1", before=networks[rank], secret=secret)
        for rank in (1, 0)
    ]
    code, out, errors = finish(processes[1])

    assert code == 0, errors
    assert json.loads(out)["text"] == run_alone()["text"]
    assert finish(processes[0])[0] == 0


def place(index: int, port: int, secret: str = "one", count: int = 2) -> Placement:
    """A placement on this machine."""
    return Placement(index, count, "127.0.0.1", port, secret.encode())


def test_who_does_not_know_the_secret_is_sent_away_and_the_rank_that_does_gets_in() -> None:
    port = find_port()
    found: dict[int, socket.socket] = {}
    listener = open_listener(place(0, port))
    waiting = threading.Thread(
        target=lambda: found.update(accept_ranks(listener, place(0, port), patience.seconds))
    )
    waiting.start()
    with pytest.raises(CannotRun, match="sent rank 1 away; set HEADSTOCK_RANK_SECRET"):
        connect_to_leader(place(1, port, "another"), patience.seconds)
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" + b"x" * 100)
        with connect_to_leader(place(1, port), patience.seconds):
            waiting.join(patience.seconds)
    assert [*found] == [1]
    found[1].close()
    listener.close()


def test_a_rank_that_does_not_come_is_named() -> None:
    first = place(0, find_port(), count=3)
    with (
        open_listener(first) as listener,
        pytest.raises(CannotRun, match=r"rank 1, 2 of 3 did not connect within 0\.2 s"),
    ):
        accept_ranks(listener, first, 0.2)
    with pytest.raises(CannotRun, match="rank 1 cannot reach rank 0 at 127"):
        connect_to_leader(place(1, find_port()), 0.2)


def test_a_rank_that_cannot_come_is_not_waited_for() -> None:
    def give_up() -> None:
        raise CannotRun("rank 1 has ended")

    with (
        open_listener(place(0, 0)) as listener,
        pytest.raises(CannotRun, match="rank 1 has ended"),
    ):
        accept_ranks(listener, place(0, 0), patience.seconds, give_up)


def test_what_listens_must_know_the_secret_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def pretend() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(bytes(32))
                connection.recv(100)
                connection.sendall(bytes(32))

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(CannotRun, match="does not know HEADSTOCK_RANK_SECRET"):
            connect_to_leader(place(1, port), patience.seconds)


SET = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"WORLD_SIZE": "4"}, r"tp \(--tp\): expected 4, as WORLD_SIZE has it, got 2"),
        ({"RANK": "one"}, "RANK: expected a number, as torchrun sets it, got 'one'"),
        ({"RANK": "2"}, "RANK, WORLD_SIZE, .*: expected .* got 2, 2, "),
        ({"MASTER_ADDR": ""}, "expected a rank below the size, an address and a port"),
        ({"MASTER_ADDR": "10.0.0.1"}, "HEADSTOCK_RANK_SECRET: expected .* got none"),
        ({"MASTER_PORT": ""}, "MASTER_PORT: expected a number"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(
    changes: dict[str, str], text: str
) -> None:
    assert read_placement({}, 2) is None
    assert read_placement(SET | {"WORLD_SIZE": "1", "RANK": "0"}, 2) is None
    assert read_placement(SET, 2) == Placement(1, 2, "127.0.0.1", 29_501, b"")
    with pytest.raises(UsageError, match=text):
        read_placement(SET | changes, 2)
