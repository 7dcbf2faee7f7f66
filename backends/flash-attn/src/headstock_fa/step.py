"""A step as the kernels of FlashAttention take it."""

from __future__ import annotations

from collections.abc import Hashable

from attrs import field, frozen
from torch import Tensor

from headstock.nn.attention.paged_plan import PagedPlan
from headstock.spi import AttentionStep, FullKV, GroupQuery
from headstock_fa.tile_schedule import TileSchedule

MOST_SPLITS = 32

MOST_PREFIX_SPLITS = 16

MOST_PROMPT_SPLITS = 16

MOST_SPLIT_TOKENS = 1024

ONE_PART_TOKENS = 1024
"""Contexts up to which a graph of prompts reads keys in one part.

More parts cost 165 us a step of 128 tokens on an H200 (28 layers). On an H100, 64 tokens after 448
took 3.5 ms for 3.4 in one part, after 960 3.2 for 3.4, and after 3,968 3.6 for 4.8.
"""

VERIFIED_TOKENS = 128
"""Tokens of a step in a graph that verifies drafts, at most."""

MOST_PARTS_BYTES = 128 << 20
"""What the parts of a step in a graph may take."""

WORTHWHILE_BYTES = 100_000_000
"""Bytes of keys and values that must be spared in a layer before shared prefixes are read once.

On an H200 a layer took 24 us for 30 where 126 MB were spared (16 rows of 2,048 shared tokens), 23
for 24 with 65 MB (32 of 512) and 23 for 21 with 63 MB (16 of 1,024).
"""


@frozen(kw_only=True, eq=False)
class FlashPlan(PagedPlan):
    """A step as the library takes it.

    num_splits: in how many parts each row's keys are read; 0 leaves it to the library
    is_causal: False where a query sees its row's whole context
    shared: the same step cut in two, for layers without a window
    rest_lens: of a plan of shared prefixes, the tokens of each row that are read meanwhile, [rows]
        int32
    schedules: by what a kernel tells layers apart by; made at first use
    """

    num_splits: int
    is_causal: bool = True
    shared: SharedPlan | None = None
    rest_lens: Tensor | None = None
    schedules: dict[Hashable, TileSchedule] = field(factory=dict, init=False)

    def update_schedules(self) -> None:
        """Make the schedules of the step anew, at the same addresses.   writes: them"""
        for schedule in self.schedules.values():
            schedule.update(self)


@frozen(kw_only=True, eq=False)
class SharedPlan:
    """Groups of rows that share leading pages, what follows those, and the length shared.

    shared_lens: [rows] int32, 0 for rows of no group
    """

    prefixes: FlashPlan
    rest: FlashPlan
    shared_lens: Tensor


def choose_num_splits(rows: int, kv_heads: int, processors: int) -> int:
    """In how many parts to read each row's keys so that `rows` decode rows fill the processors.

    One block serves all query heads of a KV head. The library takes the number as an upper bound
    and lowers it row by row.
    """
    # Twice as many blocks as processors: on an H200 that cost nothing, and 8 rows took 15.4 us
    # where as many blocks as processors took 16.7. On a full device splits cost 3 %.
    blocks = rows * kv_heads
    return 1 if blocks >= processors else min(MOST_SPLITS, -(-2 * processors // blocks))


def choose_prefix_splits(kv_heads: int, processors: int) -> int:
    """In how many parts at most to read what a group of rows shares."""
    # One block serves 128 queries of a KV head. The library counts the blocks of all groups and
    # lowers the number to what fills the device, so the bound is that of one group of few rows.
    return min(MOST_PREFIX_SPLITS, -(-processors // kv_heads))


def choose_prompt_splits(step: AttentionStep, width: int) -> int:
    """In how many parts at most to read each row's keys in a step of prompts that is in a graph.

    width: numbers in the result of a token, of all heads
    """
    # The library lowers the number row by row to what fills the device. Steps of many tokens fill
    # it by themselves.
    if step.max_query_len > MOST_SPLIT_TOKENS or step.max_context_len <= ONE_PART_TOKENS:
        return 1
    # What a part leaves for the merge is a result of all tokens in float32. One row of a graph of
    # prompts may have them all; rows that verify drafts share them.
    tokens = max(step.max_query_len, VERIFIED_TOKENS)
    return max(1, min(MOST_PROMPT_SPLITS, MOST_PARTS_BYTES // (4 * tokens * width)))


def count_worthwhile_tokens(group: GroupQuery) -> int:
    """How many reads of a token, in a layer, are worth the two more launches."""
    width = 1 if group.kv_dtype.startswith("float8") else 2
    assert isinstance(group.layout, FullKV), group.layout
    numbers = group.layout.kv_heads * (group.layout.k_dim + group.layout.v_dim)
    return -(-WORTHWHILE_BYTES // (numbers * width))
