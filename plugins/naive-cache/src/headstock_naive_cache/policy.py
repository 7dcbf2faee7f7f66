"""A policy without an index: a page belongs to its row alone and returns to the pool with it."""

from __future__ import annotations

from typing import Any

import numpy as np

from headstock.spi.arrays import Ints
from headstock.spi.cache import CachePolicy, CacheStats, Inserted, Match

NOTHING = np.empty(0, np.int32)
NOTHING.flags.writeable = False


class NaiveCache(CachePolicy):
    """Nothing is indexed, so nothing is found, held or evicted. The index is None."""

    def __init__(self, page_size: int, options: Any = None) -> None:
        """A policy for pages of any size."""

    def new_index(self) -> None:
        """None: there is nothing to remember."""

    def match_prefix(self, index: None, tokens: Ints, namespace: str) -> Match:
        """No pages, for any tokens."""
        return Match(NOTHING, None)

    def hold(self, index: None, handle: None) -> None:
        """Nothing happens."""

    def release(self, index: None, handle: None) -> None:
        """Nothing happens."""

    def insert(
        self, index: None, handle: None, tokens: Ints, pages: Ints, namespace: str
    ) -> Inserted:
        """The same pages: the row stays their only owner. Core does not call it (`reuse`)."""
        return Inserted(pages, None)

    def evict(self, index: None, count: int) -> Ints:
        """No pages: none is kept."""
        return NOTHING

    def count_evictable(self, index: None) -> int:
        """0."""
        return 0

    def evict_all(self, index: None) -> Ints:
        """No pages: none is kept."""
        return NOTHING

    def stats(self, index: None) -> CacheStats:
        """All zero."""
        return CacheStats(pages=0, held=0)

    def check_index(self, index: None) -> None:
        """Nothing can contradict itself here."""

    def indexed_pages(self, index: None) -> Ints:
        """No pages."""
        return NOTHING
