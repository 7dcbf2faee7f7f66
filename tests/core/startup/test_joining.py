"""Devices of ranks are connected while weights load, and what fails ends the load."""

from __future__ import annotations

import threading

import patience
import pytest
import torch

from headstock.errors import EngineDied
from headstock.spi import ALONE, Collectives
from headstock.startup.joining import JoiningRanks
from headstock.startup.ranks import OneRank


class Rank(OneRank):
    """A rank of two whose devices are connected, or cannot be, once the others have come."""

    count = 2

    def __init__(self, error: Exception | None = None) -> None:
        self.others_have_come = threading.Event()
        self.error = error

    def join(self, device: torch.device) -> Collectives:
        self.others_have_come.wait(patience.seconds)
        if self.error is not None:
            raise self.error
        return ALONE


@pytest.mark.feature("S19")
def test_weights_load_before_the_other_ranks_have_come() -> None:
    ranks = Rank()
    joining = JoiningRanks(ranks, torch.device("cpu"))
    reports: list[tuple[str, int, int]] = []

    joining.watch(lambda *report: reports.append(report))("weights", 1, 2)
    ranks.others_have_come.set()

    assert reports == [("weights", 1, 2)] and joining.wait() is ALONE


def test_a_load_ends_when_the_other_ranks_cannot_come() -> None:
    ranks = Rank(EngineDied("rank 1 ended"))
    joining = JoiningRanks(ranks, torch.device("cpu"))
    report = joining.watch(None)
    report("weights", 1, 2)

    ranks.others_have_come.set()
    with pytest.raises(EngineDied, match=r"^rank 1 ended$"):
        joining.wait()
    with pytest.raises(EngineDied, match=r"^rank 1 ended$"):
        report("weights", 2, 2)
