"""What all ranks must have decided alike, and what may differ between them."""

from __future__ import annotations

import torch

from headstock.config import EngineConfig
from headstock.startup.decisions import decide_parts
from headstock.startup.ranks import OneRank
from headstock.startup.start_times import StartTimes


def test_ranks_with_other_numbers_of_threads_have_decided_alike() -> None:
    before = torch.get_num_threads()
    described = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            described.append(
                decide_parts(OneRank(), EngineConfig(model="demo"), StartTimes()).describe()
            )
    finally:
        torch.set_num_threads(before)

    assert described[0] == described[1]


def test_ranks_with_other_pages_have_not() -> None:
    described = [
        decide_parts(OneRank(), EngineConfig(model="demo", page_size=size), StartTimes()).describe()
        for size in (16, 32)
    ]
    assert described[0]["terms"] != described[1]["terms"]
