"""What the kernels are told of a step."""

from __future__ import annotations

from functools import cached_property

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

MOST_SPLITS = 32


@frozen(kw_only=True, eq=False)
class FlashPlan:
    """A step as FlashAttention takes it. Only tensors change between replays of a graph.

    query_start: [rows + 1] int32    context_lens: [rows] int32    page_tables: by group, [rows, columns] int32
    `num_splits` 0 leaves it to the library.
    """

    query_start: Tensor
    context_lens: Tensor
    page_tables: tuple[Tensor, ...]
    max_query_len: int
    max_context_len: int
    num_splits: int
    is_decode: bool

    @cached_property
    def context_start(self) -> Tensor:
        """Where each row's context would start if all were laid end to end. [rows + 1] int32"""
        return F.pad(self.context_lens.cumsum(0, dtype=torch.int32), (1, 0))


def splits(rows: int, kv_heads: int, processors: int) -> int:
    """In how many parts to read each row's keys so that `rows` decode rows fill the processors.

    One block serves all query heads of a KV head. The library takes the number as an upper bound and lowers it row by
    row. On an H200 twice what fills it once cost nothing, and 8 rows took 15.4 us where half of that took 16.7; with
    the device full, splits cost 3 %.
    """
    blocks = rows * kv_heads
    return 1 if blocks >= processors else min(MOST_SPLITS, -(-2 * processors // blocks))
