"""How attention is cut into programs."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstock_triton_attn.tiles import (
    ACCUMULATED,
    LEAST_TOKENS,
    MOST_SPLITS,
    SMALL_SHARED,
    choose_prompt_tile,
    choose_split_tile,
    choose_splits,
    pad_head,
)

RATIOS = st.integers(1, 130)
HEAD_DIMS = st.integers(1, 64).map(lambda number: 8 * number)
SHARED = st.sampled_from([SMALL_SHARED, 163 * 1024, 227 * 1024])


@given(ratio=RATIOS, head_dim=HEAD_DIMS, itemsize=st.sampled_from([2, 4]), shared=SHARED)
def test_a_tile_fits_and_holds_all_query_heads_that_it_can(
    ratio: int, head_dim: int, itemsize: int, shared: int
) -> None:
    shape = {"ratio": ratio, "head_dim": head_dim, "itemsize": itemsize, "shared": shared}
    dim = pad_head(head_dim)
    split = partial(choose_split_tile, **shape)
    for tile in (choose_prompt_tile(**shape), split(queries=8), split(queries=1)):
        assert tile.queries >= 1 and tile.group >= 1
        assert tile.queries * tile.group <= tile.width
        assert tile.group == min(ratio, tile.width)
        # Tensor cores take 16 at a time; a block of the usual page is in one page.
        assert tile.width % 16 == 0 and 64 % tile.tokens == 0 and tile.tokens >= 16
        assert tile.width * dim <= ACCUMULATED
        blocks = 4 if itemsize == 2 and tile.width > 16 else 2
        assert (tile.width + blocks * tile.tokens) * dim * itemsize <= shared
    assert split(queries=1).queries == 1


@given(
    kv_heads=st.integers(1, 64),
    ratio=RATIOS,
    head_dim=HEAD_DIMS,
    max_seq_len=st.integers(1, 1 << 20),
    processors=st.integers(1, 160),
)
def test_parts_fill_the_processors_and_are_no_more_than_useful(
    kv_heads: int, ratio: int, head_dim: int, max_seq_len: int, processors: int
) -> None:
    tile = choose_split_tile(queries=1, ratio=ratio, head_dim=head_dim, itemsize=2)
    splits = choose_splits(
        kv_heads=kv_heads,
        ratio=ratio,
        tile=tile,
        max_seq_len=max_seq_len,
        processors=processors,
    )
    assert splits & (splits - 1) == 0 and 1 <= splits <= MOST_SPLITS
    programs = kv_heads * -(-ratio // tile.group) * splits
    assert (
        programs >= 2 * processors or splits == MOST_SPLITS or splits * LEAST_TOKENS >= max_seq_len
    )
    assert splits == 1 or (splits // 2) * LEAST_TOKENS < max_seq_len
    assert splits == 1 or programs // 2 < 2 * processors


@pytest.mark.parametrize(
    ("head_dim", "prompt", "decode"),
    [
        (512, (64, 32, 8), (16, 32, 8)),
        (256, (128, 64, 8), (16, 64, 4)),
        (128, (128, 64, 8), (16, 64, 4)),
    ],
)
def test_the_tiles_of_an_h200_are_those_that_were_computed(
    head_dim: int, prompt: tuple[int, int, int], decode: tuple[int, int, int]
) -> None:
    for choose, expected in (
        (choose_prompt_tile, prompt),
        (partial(choose_split_tile, queries=1), decode),
    ):
        tile = choose(ratio=8, head_dim=head_dim, itemsize=2, shared=227 * 1024)
        assert (tile.width, tile.tokens, tile.warps) == expected
