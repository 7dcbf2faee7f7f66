"""Room for partial results that layers of different shapes share."""

from __future__ import annotations

import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from headstock_triton_attn.launch import MOST_PARTS_BYTES, Launch, Parts
from headstock_triton_attn.tiles import choose_split_tile

META = torch.device("meta")


@st.composite
def launches(draw: st.DrawFn) -> Launch:
    """How layers of some shape are cut."""
    ratio, head_dim = draw(st.integers(1, 20)), 8 * draw(st.integers(1, 64))
    tile = choose_split_tile(
        queries=draw(st.sampled_from([1, 8])), ratio=ratio, head_dim=head_dim, itemsize=2
    )
    splits, kv_heads = draw(st.sampled_from([1, 2, 64])), draw(st.integers(1, 16))
    return Launch(tile=tile, splits=splits, kv_heads=kv_heads, ratio=ratio, head_dim=head_dim)


@given(shapes=st.lists(launches(), min_size=1, max_size=4), rows=st.integers(1, 300))
def test_every_launch_has_room_for_what_it_writes(shapes: list[Launch], rows: int) -> None:
    parts = Parts.new(shapes, rows, META)
    for launch in shapes:
        if launch.splits == 1:
            continue
        blocks = parts.count_blocks(launch)
        assert blocks >= 1
        assert blocks * launch.slots_a_block * launch.head_dim <= parts.sums.numel()
        assert blocks * launch.slots_a_block * 2 <= parts.levels.numel()


@given(launch=launches())
def test_room_is_bounded_and_nothing_is_kept_without_parts(launch: Launch) -> None:
    parts = Parts.new([launch], 1000, META)
    block = 4 * launch.slots_a_block * launch.head_dim
    assert parts.sums.nbytes <= max(MOST_PARTS_BYTES, block)
    assert Parts.new([evolve(launch, splits=1)], 1000, META).sums.numel() == 0
