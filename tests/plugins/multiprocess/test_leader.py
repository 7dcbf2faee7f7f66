"""What rank 0 asks of other ranks, and what it refuses before it starts any."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import patience
import pytest
import torch

from headstock.config import EngineConfig
from headstock.errors import CannotRun
from headstock_multiprocess.leader import Follower, Leader
from headstock_multiprocess.leading_executor import LeadingExecutor
from headstock_multiprocess.link import Link
from headstock_multiprocess.messages import Collected, FromRank, Shared, ToRank
from headstock_multiprocess.options import MultiprocessOptions
from headstock_multiprocess.processes import RankProcess
from headstock_multiprocess.start import start_ranks


class NoProcess(RankProcess):
    """A rank of this process."""

    def __str__(self) -> str:
        return "a thread"

    def kill(self) -> None:
        pass

    def wait(self, seconds: float) -> None:
        pass

    def describe_end(self) -> str:
        return "ended"


@pytest.mark.feature("S19")
def test_all_ranks_take_the_least_number_of_any() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    ours = [Link[FromRank](pair[0], FromRank) for pair in pairs]
    theirs = [Link[ToRank](pair[1], ToRank) for pair in pairs]
    followers = [Follower(index, NoProcess(), link) for index, link in enumerate(ours, start=1)]
    leader = Leader(3, "127.0.0.1", MultiprocessOptions(), followers)
    answers: list[object] = []

    def answer(link: Link[ToRank], numbers: tuple[int, ...]) -> None:
        link.send(Collected(numbers))
        answers.append(link.receive())

    threads = [
        threading.Thread(target=answer, args=(link, numbers))
        for link, numbers in zip(theirs, [(700, 8), (650, 9)], strict=True)
    ]
    for thread in threads:
        thread.start()

    assert leader.take_least([690, 8]) == (650, 8)
    for thread in threads:
        thread.join(patience.seconds)
    assert [list(each.value) for each in answers if isinstance(each, Shared)] == [[650, 8]] * 2
    leader.close()
    for link in theirs:
        link.close()


@pytest.mark.feature("S19")
def test_more_ranks_than_gpus_are_refused_and_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = EngineConfig(model=str(tmp_path), tp=4, device="cuda")

    ranks: Any = start_ranks(config, MultiprocessOptions())
    with pytest.raises(CannotRun, match=r"^tp \(--tp\) 4: expected as many GPUs, got 2; "):
        ranks.begin()
    ranks.close()

    # They were in their imports, which nothing waits for.
    codes = [each.process.process.returncode for each in ranks.followers]
    assert codes == [-signal.SIGKILL] * 3


class Events(list[str]):
    """The order in which ranks and an executor are asked to end."""

    def __getattr__(self, name: str) -> Callable[[], None]:
        return lambda: self.append(name)


def test_ranks_free_their_devices_at_the_same_time() -> None:
    events = Events()
    ranks: Any = SimpleNamespace(ask_to_end=events.ask_others, close=events.wait_for_others)
    inner: Any = SimpleNamespace(close=events.free_own)

    LeadingExecutor(inner, ranks).close()

    assert events == ["ask_others", "free_own", "wait_for_others"]
