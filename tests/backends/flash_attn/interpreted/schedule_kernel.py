"""The kernel that chooses a schedule against the same in torch."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock_fa.schedule_kernel import choose_in_kernel
from headstock_fa.tile_schedule import SharedWork, choose_in_torch


@settings(max_examples=40)
@given(
    counts=st.lists(st.integers(0, 70), min_size=1, max_size=17),
    alone=st.integers(1, 9),
    group=st.sampled_from([1, 2, 4, 7]),
    size=st.integers(1, 70),
    own=st.integers(1, 900),
    processors=st.sampled_from([4, 78, 132]),
    seed=st.integers(0, 9999),
)
def test_the_kernel_chooses_as_torch_does(
    counts: list[int],
    alone: int,
    group: int,
    size: int,
    own: int,
    processors: int,
    seed: int,
) -> None:
    noise = torch.Generator().manual_seed(seed)
    rows = sum(counts) + alone
    work = SharedWork(
        query_start=torch.tensor([0, *counts]).cumsum(0).int(),
        prefix_lens=torch.randint(0, 40, (len(counts),), generator=noise).int() * 64,
        rest_lens=torch.randint(1, own + 1, (rows,), generator=noise).int(),
        group=group,
    )
    schedules = list(torch.randint(-9, 9, (3, size), generator=noise).int())
    chosen = choose_in_kernel(schedules, work, processors)
    assert torch.equal(chosen, choose_in_torch(schedules, work, processors))
