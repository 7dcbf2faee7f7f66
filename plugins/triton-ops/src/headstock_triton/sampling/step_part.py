"""A step whose rows are sampled in two parts, on two streams."""

from __future__ import annotations

import triton.language as tl
from attrs import frozen
from torch import Tensor

from headstock_triton.device_function import device_function
from headstock_triton.sampling.streams import Beside

MOST_ROWS = tl.constexpr(8)
"""Number of rows up to which some are sampled separately: with more, torch is as fast."""


@device_function
def is_listed(row, some, count):
    """Whether the row is among those sampled separately.   some: `count` row numbers"""
    each = tl.arange(0, MOST_ROWS)
    return tl.max((tl.load(some + each, each < count, other=-1) == row).to(tl.int32), 0) > 0


@frozen(kw_only=True, eq=False)
class StepPart:
    """Some rows of a step, or the others, which are sampled next to them.

    tokens, healthy: [n] int64, [n] uint8, of all rows; those of the part are written
    some: [m] int64, the rows of the first part, possibly repeated
    is_some: whether the logits are those of `some`; else they are those of all rows, and `some` is
        excluded
    beside: where those of `some` are sampled
    """

    tokens: Tensor
    healthy: Tensor
    some: Tensor
    is_some: bool
    beside: Beside
