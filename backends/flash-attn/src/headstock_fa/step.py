"""A step in the form that FlashAttention's kernels take."""

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

More parts cost 165 us for a step of 128 tokens on an H200 (28 layers). On an H100, 64 tokens after
448 / 960 / 3,968 took 3.5 / 3.2 / 3.6 ms in parts, and 3.4 / 3.4 / 4.8 in one part.
"""

VERIFIED_TOKENS = 128
"""Maximum tokens of a step in a graph that verifies drafts."""

MOST_PARTS_BYTES = 128 << 20
"""Memory limit of the partial results of a step in a graph."""

WORTHWHILE_BYTES = 100_000_000
"""Minimum bytes of keys and values saved in a layer for reading shared prefixes once.

On an H200 it changed a layer from 30 to 24 us when saving 126 MB (16 rows of 2,048 shared tokens),
from 24 to 23 with 65 MB (32 of 512) and from 21 to 23 with 63 MB (16 of 1,024).
"""


@frozen(kw_only=True, eq=False)
class FlashPlan(PagedPlan):
    """A step as the library takes it.

    num_splits: number of parts in which each row's keys are read; 0: the library chooses
    is_causal: False if a query sees its row's whole context
    shared: the same step split in two, for layers without a window
    rest_lens: for a plan of shared prefixes, the tokens of each row read at the same time, [rows]
        int32
    schedules: by the kernel's key of layers; made at first use
    """

    num_splits: int
    is_causal: bool = True
    shared: SharedPlan | None = None
    rest_lens: Tensor | None = None
    schedules: dict[Hashable, TileSchedule] = field(factory=dict, init=False)

    def update_schedules(self) -> None:
        """Rewrite the schedules of the step, at the same addresses.   writes: them"""
        for schedule in self.schedules.values():
            schedule.update(self)


@frozen(kw_only=True, eq=False)
class SharedPlan:
    """Groups of rows that share leading pages, the rest of each row, and the shared length.

    shared_lens: [rows] int32, 0 for rows without a group
    """

    prefixes: FlashPlan
    rest: FlashPlan
    shared_lens: Tensor


def choose_num_splits(rows: int, kv_heads: int, processors: int) -> int:
    """The number of parts of each row's keys such that `rows` decode rows fill the processors.

    One block serves all query heads of a KV head. The library takes the number as an upper bound
    and lowers it row by row.
    """
    # Twice as many blocks as processors: on an H200 that cost nothing, and 8 rows took 15.4 us
    # instead of 16.7 with one block per processor. On a full device splits cost 3 %.
    blocks = rows * kv_heads
    return 1 if blocks >= processors else min(MOST_SPLITS, -(-2 * processors // blocks))


def choose_prefix_splits(kv_heads: int, processors: int) -> int:
    """The maximum number of parts in which a group's shared tokens are read."""
    # One block serves 128 queries of a KV head. The library counts the blocks of all groups and
    # lowers the number until it just fills the device, so the bound is that of one small group.
    return min(MOST_PREFIX_SPLITS, -(-processors // kv_heads))


def choose_prompt_splits(step: AttentionStep, width: int) -> int:
    """The maximum number of parts of each row's keys in a graph of a prompt step.

    width: size of a token's result, all heads together
    """
    # The library lowers the number row by row until it just fills the device. Steps of many tokens
    # fill it without splits.
    if step.max_query_len > MOST_SPLIT_TOKENS or step.max_context_len <= ONE_PART_TOKENS:
        return 1
    # Each part has a float32 result for all tokens. One row of a graph of prompts may have all
    # tokens; rows that verify drafts share them.
    tokens = max(step.max_query_len, VERIFIED_TOKENS)
    return max(1, min(MOST_PROMPT_SPLITS, MOST_PARTS_BYTES // (4 * tokens * width)))


def count_worthwhile_tokens(group: GroupQuery) -> int:
    """How many token reads saved per layer are worth the two additional launches."""
    width = 1 if group.kv_dtype.startswith("float8") else 2
    assert isinstance(group.layout, FullKV), group.layout
    numbers = group.layout.kv_heads * (group.layout.k_dim + group.layout.v_dim)
    return -(-WORTHWHILE_BYTES // (numbers * width))
