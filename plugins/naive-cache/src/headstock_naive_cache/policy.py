"""A policy without an index: a page belongs to one row and returns to the pool with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headstock.spi.arrays import Ints
from headstock.spi.cache import CachePolicy, CacheStats, Inserted, Match
from headstock.spi.kv import KVGroup


class NaiveCache(CachePolicy):
    """Nothing is indexed, so nothing is matched, held or evicted. The index is None."""

    def __init__(self, page_size: int, groups: Sequence[KVGroup], options: Any = None) -> None:
        """A policy for pages of any size."""
        self.num_groups = len(groups)
        self.nothing = np.empty((self.num_groups, 0), np.int32)
        self.nothing.flags.writeable = False

    def new_index(self) -> None:
        """None: there is no state."""

    def match_prefix(self, index: None, keys: Ints, namespace: str) -> Match:
        """No pages, for any keys."""
        return Match(self.nothing, None)

    def hold(self, index: None, handle: None) -> None:
        """Nothing happens."""

    def release(self, index: None, handle: None) -> None:
        """Nothing happens."""

    def insert(
        self, index: None, handle: None, keys: Ints, pages: Ints, namespace: str
    ) -> Inserted:
        """The same pages: the row stays their only owner. Core does not call it (`reuse`)."""
        return Inserted(pages, None)

    def evict(self, index: None, group: int, count: int) -> Sequence[Ints]:
        """No pages: none is kept."""
        return tuple(self.nothing)

    def count_evictable(self, index: None, group: int) -> int:
        """0."""
        return 0

    def evict_all(self, index: None) -> Sequence[Ints]:
        """No pages: none is kept."""
        return tuple(self.nothing)

    def stats(self, index: None) -> CacheStats:
        """All zero."""
        return CacheStats(pages=(0,) * self.num_groups, held=(0,) * self.num_groups)

    def check_index(self, index: None) -> None:
        """There is nothing to check."""

    def indexed_pages(self, index: None, group: int) -> Ints:
        """No pages."""
        nothing: Ints = self.nothing[group]
        return nothing
