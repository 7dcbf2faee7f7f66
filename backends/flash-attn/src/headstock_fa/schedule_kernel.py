"""The choice among schedules, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from headstock_fa.tile_schedule import KEYS_MEANWHILE, SHARES, TILE_QUERIES, SharedWork


@triton.jit(do_not_specialize=("groups", "rows", "size"))
def schedule_kernel(
    few,
    half,
    most,
    out,
    query_start,
    prefix_lens,
    rest_lens,
    groups,
    rows,
    size,
    few_processors,
    half_processors,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: counts, then copies one of the three schedules."""
    g = tl.arange(0, BLOCK_GROUPS)
    exists = g < groups
    first = tl.load(query_start + g, exists, other=0)
    last = tl.load(query_start + g + 1, exists, other=0)
    tiles = tl.cdiv((last - first) * GROUP, TILE).to(tl.float32)
    keys = tl.sum(tiles * tl.load(prefix_lens + g, exists, other=0).to(tl.float32))
    row = tl.arange(0, BLOCK_ROWS)
    rest = tl.sum(tl.load(rest_lens + row, row < rows, other=0).to(tl.float32))
    wanted = keys * KEYS / rest
    at = tl.arange(0, BLOCK)
    inside = at < size
    chosen = tl.load(few + at, inside, other=0)
    chosen = tl.where(wanted > few_processors, tl.load(half + at, inside, other=0), chosen)
    chosen = tl.where(wanted > half_processors, tl.load(most + at, inside, other=0), chosen)
    tl.store(out + at, chosen, inside)


def choose_in_kernel(schedules: Sequence[Tensor], work: SharedWork, processors: int) -> Tensor:
    """See `tile_schedule.choose_schedule`."""
    few, half, most = schedules
    out = most.new_empty(most.shape)
    groups, rows = len(work.prefix_lens), len(work.rest_lens)
    schedule_kernel[(1,)](
        few,
        half,
        most,
        out,
        work.query_start,
        work.prefix_lens,
        work.rest_lens,
        groups,
        rows,
        len(out),
        float(processors // SHARES[0]),
        float(processors // SHARES[1]),
        GROUP=work.group,
        TILE=TILE_QUERIES,
        KEYS=KEYS_MEANWHILE,
        BLOCK_GROUPS=triton.next_power_of_2(groups),
        BLOCK_ROWS=triton.next_power_of_2(rows),
        BLOCK=triton.next_power_of_2(len(out)),
    )
    return out
