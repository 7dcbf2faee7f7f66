"""A step as the kernels of FlashAttention take it."""

from __future__ import annotations

from attrs import frozen

from headstock.nn.attention.paged_plan import PagedPlan

MOST_SPLITS = 32


@frozen(kw_only=True, eq=False)
class FlashPlan(PagedPlan):
    """A step, and in how many parts each row's keys are read; 0 leaves it to the library."""

    num_splits: int


def choose_num_splits(rows: int, kv_heads: int, processors: int) -> int:
    """In how many parts to read each row's keys so that `rows` decode rows fill the processors.

    One block serves all query heads of a KV head. The library takes the number as an upper bound
    and lowers it row by row.
    """
    # Twice as many blocks as processors: on an H200 that cost nothing, and 8 rows took 15.4 us
    # where as many blocks as processors took 16.7. On a full device splits cost 3 %.
    blocks = rows * kv_heads
    return 1 if blocks >= processors else min(MOST_SPLITS, -(-2 * processors // blocks))
