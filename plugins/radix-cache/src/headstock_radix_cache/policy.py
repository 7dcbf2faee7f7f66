"""The prefix tree as a cache policy.

A handle is the node at the end of a prefix; None stands for the empty prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headstock.spi.arrays import Ints
from headstock.spi.cache import CachePolicy, CacheStats, Inserted, Match
from headstock.spi.kv import KVGroup
from headstock_radix_cache.check import (
    assert_handle,
    assert_held_pages,
    assert_index,
    assert_insert,
    assert_snapshot,
)
from headstock_radix_cache.group_tree import GroupIndex
from headstock_radix_cache.options import RadixOptions
from headstock_radix_cache.tree import Index, Node


class RadixCache(CachePolicy):
    """Full pages are shared by all requests of a namespace that begin with the same keys.

    A page's last use is the latest moment at which a hold protected it. The pages that were idle
    longest are evicted first.
    """

    def __init__(
        self, page_size: int, groups: Sequence[KVGroup], options: RadixOptions | None = None
    ) -> None:
        """A policy for pages of `page_size` tokens."""
        options = options or RadixOptions()
        self.page_size = page_size
        self.groups = tuple(groups)
        # Most models have one group that keeps all tokens; this is their fast path.
        self.is_plain = len(self.groups) == 1 and self.groups[0].retains_all
        self.max_prefixes = options.max_prefixes
        self.debug = options.debug

    def new_index(self) -> Index:
        """An empty index."""
        return Index() if self.is_plain else GroupIndex(self.groups, self.page_size)

    def match_prefix(self, index: Index, keys: Ints, namespace: str) -> Match:
        """The longest indexed page-aligned true prefix of `keys`; O(pages found).

        keys: [n] int32
        """
        node = index.roots.get(namespace)
        pages: list[Any] = []
        if node is not None and self.max_prefixes != 0:
            # Keys are bytes: a slice and a hash per page, without an object per token.
            data = keys.tobytes()
            width = self.page_size * keys.itemsize
            for start in range(0, len(data) - width + 1, width):
                child = node.children.get(data[start : start + width])
                if child is None:
                    break
                node = child
                pages.append(node.page)
        if isinstance(index, GroupIndex):
            return self._end_match(index, node, pages)
        return Match(np.array([pages], np.int32), node if pages else None)

    def _end_match(self, index: GroupIndex, node: Node | None, found: list[list[int]]) -> Match:
        """The match that ends where every group has the pages that the next token reads, at most at
        `node`.

        found: the pages of each node up to `node`, by group
        """
        count = index.count_reusable(found)
        for _ in range(len(found) - count):
            assert node is not None
            node = node.parent
        pages = np.array(found[:count], np.int32).reshape(count, len(self.groups)).T.copy()
        for row, group in zip(pages, self.groups, strict=True):
            row[: group.first_kept_page(count * self.page_size, self.page_size)] = 0
        for state in index.states if count else ():
            pages[state, :-1] = 0
        return Match(pages, node if count else None, len(found))

    def hold(self, index: Index, handle: Node | None) -> None:
        """Keep the pages up to `handle` from eviction; O(1), or O(pages that become held)."""
        if handle is None:
            return
        # Even without debug: it is O(1), and an evicted handle would protect pages that others own
        # by now.
        assert_handle(handle, must_be_held=False)
        index.version += 1
        index.lock(handle)
        if isinstance(index, GroupIndex):
            index.note_use(handle)

    def release(self, index: Index, handle: Node | None) -> None:
        """Undo one hold; pages without any then are the most recently used. O(such pages)."""
        if handle is None:
            return
        if self.debug:
            assert_handle(handle, must_be_held=True)
        index.version += 1
        index.unlock(handle)
        end = index.trim_end(handle)
        if self.max_prefixes is not None and end.depth:
            index.note_end(end, self.max_prefixes)

    def hold_pages(self, index: Index, group: int, pages: Ints) -> None:
        """Keep pages of a window group from eviction; O(1) a page."""
        assert isinstance(index, GroupIndex)
        index.version += 1
        index.hold_pages(group, pages.tolist())

    def release_pages(self, index: Index, group: int, pages: Ints) -> None:
        """Let pages of a window group be evicted; they are the most recently used. O(1) a page."""
        assert isinstance(index, GroupIndex)
        if self.debug:
            assert_held_pages(index, group, pages)
        index.version += 1
        index.release_pages(group, pages.tolist())

    def insert(
        self, index: Index, handle: Node | None, keys: Ints, pages: Ints, namespace: str
    ) -> Inserted:
        """Index whole pages that follow `handle`; the hold moves along. O(1) a page.

        keys: [n * page_size] int32    pages: [groups, n] int32
        """
        if self.debug:
            assert_insert(index, handle, keys, pages, self.page_size)
        whole = keys.reshape(-1, self.page_size)
        canonical, (end,) = self.insert_each(
            index, (handle,), (pages.shape[1],), whole, pages, (namespace,)
        )
        return Inserted(canonical, end)

    def insert_each(
        self,
        index: Index,
        handles: Sequence[Node | None],
        counts: Sequence[int],
        keys: Ints,
        pages: Ints,
        namespaces: Sequence[str],
    ) -> tuple[Ints, list[Node | None]]:
        """Index `counts[i]` pages that follow `handles[i]`; the holds move along. O(1) a page.

        keys: [sum of counts, page_size] int32    pages: [groups, sum of counts] int32
        """
        # Once for all rows of a step: page by page an insert takes 2.0 us (decision 0013).
        data, width = keys.tobytes(), self.page_size * keys.itemsize
        page_list: list[Any] = pages[0].tolist() if self.is_plain else pages.T.tolist()
        canonical: list[Any] = []
        ends: list[Node | None] = []
        stop = 0
        for handle, count, namespace in zip(handles, counts, namespaces, strict=True):
            start, stop = stop, stop + count
            if self.debug:
                assert_insert(
                    index, handle, keys[start:stop].ravel(), pages[:, start:stop], self.page_size
                )
            node = handle
            if node is None and count:
                node = index.get_root(namespace)
                node.refs += 1
            if node is not None:
                node = index.append_pages(
                    node, data, width, start * width, page_list[start:stop], canonical
                )
            ends.append(node)
        index.version += 1
        # The array itself tells core that no page was a duplicate.
        if canonical == page_list:
            return pages, ends
        numbers = np.array(canonical, np.int32)
        return numbers[None] if self.is_plain else numbers.T, ends

    def add_snapshot(self, index: Index, handle: Node | None, num_pages: int, pages: Ints) -> Ints:
        """Index the states behind the first `num_pages` pages up to `handle`.

        O(pages behind them).
        """
        assert isinstance(index, GroupIndex)
        if self.debug:
            assert_snapshot(index, handle, num_pages, pages)
        index.version += 1
        node = handle
        while node is not None and node.depth > num_pages:
            node = node.parent
        assert node is not None
        return np.array(index.add_snapshot(node, pages.tolist()), np.int32)

    def evict(self, index: Index, group: int, count: int) -> list[Ints]:
        """Drop unheld pages until `count` of `group` are gone; O(pages dropped).

        Least recently used first; of one prefix the deepest first. Leaves where no match can end
        are dropped too.

        returns: by group, [n] int32
        """
        index.version += 1
        return [np.array(pages, np.int32) for pages in index.evict(group, count)]

    def count_evictable(self, index: Index, group: int) -> int:
        """How many pages of `group` are not held; O(1)."""
        return index.count_evictable(group)

    def evict_all(self, index: Index) -> list[Ints]:
        """Drop every unheld page and return them all."""
        evicted = [
            self.evict(index, group, index.count_evictable(group))
            for group in range(len(self.groups))
        ]
        return [np.concatenate(parts) for parts in zip(*evicted, strict=True)]

    def stats(self, index: Index) -> CacheStats:
        """The counts of the index."""
        pages = index.count_pages()
        return CacheStats(
            pages=pages,
            held=tuple(count - index.count_evictable(group) for group, count in enumerate(pages)),
        )

    def check_index(self, index: Index) -> None:
        """Raise AssertionError with a reason when the index contradicts itself; O(pages)."""
        assert_index(index, self.page_size)

    def indexed_pages(self, index: Index, group: int) -> Ints:
        """Every page of `group` that the index holds, in no order; O(pages)."""
        return np.array(index.list_pages(group), np.int32)
