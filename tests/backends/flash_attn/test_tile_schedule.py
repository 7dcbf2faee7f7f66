"""How many processors take shared prefixes while others read the rest, without a GPU."""

from __future__ import annotations

import pytest
import torch
from plugins.triton_ops.test_compile import compiled

from headstock_fa.schedule_kernel import choose_in_kernel
from headstock_fa.tile_schedule import SharedWork, choose_in_torch, list_margins

__all__ = ["compiled"]

PROCESSORS = 132


def make_work(groups: int, rows: int, shared: int, own: int, group: int) -> SharedWork:
    """So many groups of `rows` rows, each with as many shared tokens and tokens of its own."""
    return SharedWork(
        query_start=torch.arange(groups + 1, dtype=torch.int32) * rows,
        prefix_lens=torch.full((groups,), shared, dtype=torch.int32),
        rest_lens=torch.full((groups * rows,), own, dtype=torch.int32),
        group=group,
    )


@pytest.mark.parametrize(
    ("groups", "rows", "shared", "own", "group", "fastest"),
    [
        (1, 256, 2048, 160, 2, 33),
        (1, 256, 512, 160, 2, 33),
        (1, 256, 8192, 160, 2, 66),
        (1, 256, 32768, 160, 2, 132),
        (1, 256, 2048, 850, 2, 33),
        (4, 64, 2048, 160, 2, 33),
        (1, 16, 4096, 160, 2, 132),
        (1, 256, 512, 160, 4, 33),
        (1, 256, 8192, 160, 4, 132),
        (1, 64, 8192, 160, 4, 132),
        (1, 256, 2048, 160, 8, 66),
    ],
)
def test_prefixes_take_as_many_processors_as_was_fastest(
    groups: int, rows: int, shared: int, own: int, group: int, fastest: int
) -> None:
    schedules = [torch.tensor([PROCESSORS - margin]) for margin in list_margins(PROCESSORS)]
    work = make_work(groups, rows, shared, own, group)
    assert choose_in_torch(schedules, work, PROCESSORS).tolist() == [fastest]


def test_without_groups_the_choice_is_one_of_the_schedules() -> None:
    schedules = [torch.tensor([PROCESSORS - margin]) for margin in list_margins(PROCESSORS)]
    work = make_work(1, 0, 0, 1, 2)
    nothing = SharedWork(
        query_start=work.query_start, prefix_lens=work.prefix_lens, rest_lens=torch.ones(8), group=2
    )
    assert choose_in_torch(schedules, nothing, PROCESSORS).tolist() == [33]


def test_tritons_compiler_takes_the_kernel(compiled: list[str]) -> None:
    schedules = [torch.zeros(69, dtype=torch.int32)] * 3
    choose_in_kernel(schedules, make_work(16, 3, 64, 5, 2), PROCESSORS)
    assert compiled == ["schedule_kernel"]
