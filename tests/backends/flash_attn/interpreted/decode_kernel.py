"""The kernel for decode rows against attention written out in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attrs import evolve
from often import often

from headstock.spi import LayerInfo, Phase
from headstock_conformance import attention as cases
from headstock_fa.decode_kernel import PartialSums, attend_decode_rows
from headstock_fa.decode_tile import DecodeTile

LAYER = LayerInfo(index=0, group=0, scale=0.25)
SMALL = DecodeTile(tokens=16, splits=4)


def attend(
    lens: list[int],
    *,
    layer: LayerInfo = LAYER,
    tile: DecodeTile = SMALL,
    dtype: torch.dtype = torch.bfloat16,
    **shape: Any,
) -> None:
    """Attend twice, over sums that hold NaN at first, and compare; pages' free slots hold NaN."""
    case = cases.make(Phase.DECODE, [(1, n) for n in lens], dtype=dtype, **shape)
    (rows, heads, head_dim), kv_heads = case.q.shape, case.pool.shape[3]
    parts = PartialSums.new(
        rows=rows,
        parts=rows * tile.splits,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        device=case.q.device,
    )
    parts.sums.fill_(math.nan)
    parts.levels.fill_(math.nan)
    out, lse = torch.empty_like(case.q), torch.empty(rows, heads)
    answer, logs = cases.expected(case, layer)
    for _ in range(2):
        out.fill_(math.nan)
        lse.fill_(math.nan)
        attend_decode_rows(
            case.q,
            case.pool[:, 0],
            case.pool[:, 1],
            case.step.context_lens,
            case.step.page_tables[0],
            layer,
            out,
            lse,
            parts,
            tile=tile,
        )
        cases.compare(out, answer)
        torch.testing.assert_close(lse, logs, atol=1e-2, rtol=1e-3)
        assert not parts.counters.any(), "the next launch begins with other counts"


@pytest.mark.parametrize("page_size", often(1, [16, 40, 64, 1000]))
def test_lengths_around_the_ends_of_pages_and_blocks(page_size: int) -> None:
    attend([1, 2, 16, 17, 18, 33, 65], page_size=page_size, heads=2, kv_heads=1, head_dim=16)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    often(1, [(7, 1, 80), (8, 1, 64), (2, 2, 128), (4, 2, 256), (36, 2, 24)]),
)
def test_shapes(heads: int, kv_heads: int, head_dim: int) -> None:
    attend([33, 5], heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=torch.float16)


@pytest.mark.parametrize("splits", often(2, [1, 32, 2, 8]))
def test_any_number_of_splits_gives_the_same(splits: int) -> None:
    attend([1, 40, 100], tile=evolve(SMALL, splits=splits), heads=2, kv_heads=1, head_dim=16)


@pytest.mark.parametrize("least_tokens", often(1, [40, 16, 1000]))
def test_parts_have_a_least_size(least_tokens: int) -> None:
    tile = evolve(SMALL, least_tokens=least_tokens)
    attend([1, 33, 100, 49], tile=tile, heads=2, kv_heads=1, head_dim=16)


@pytest.mark.parametrize("window", [1, 7, 16, 1000])
def test_a_window_counts_the_query_itself(window: int) -> None:
    attend([2, 50], layer=evolve(LAYER, window=window), heads=2, kv_heads=1, head_dim=16)


def test_a_soft_cap_bites() -> None:
    attend([1, 50], layer=evolve(LAYER, softcap=2.0), head_dim=16)
    attend([50], layer=evolve(LAYER, softcap=0.5, window=20, scale=40.0), head_dim=16)


def test_more_parts_than_are_merged_at_once() -> None:
    attend([16 * 10 + 3], tile=evolve(SMALL, splits=32), heads=1, kv_heads=1, head_dim=16)
