"""Regions that ended sequences left behind, in contiguous mode (docs/decisions/0008)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import field, frozen

from headstock.spi.arrays import Ints


@frozen(kw_only=True, eq=False)
class Region:
    """The pages of a sequence that no row computes any more: one of each KV group.

    tokens: [n] int32, all that was computed of the sequence
    """

    tokens: Ints = field(repr=False)
    pages: tuple[int, ...]
    namespace: str


def match_region(regions: Sequence[Region], tokens: Ints, namespace: str) -> Region | None:
    """Return the region with the most tokens that `tokens` continue, or None.

    A region matches whole or not at all.
    tokens: [n] int32
    """
    best = None
    for region in regions:
        length = len(region.tokens)
        if (
            region.namespace == namespace
            and length <= len(tokens)
            and (best is None or length >= len(best.tokens))
            and np.array_equal(region.tokens, tokens[:length])
        ):
            best = region
    return best
