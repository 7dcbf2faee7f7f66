"""The prefix tree as a cache policy.

A handle is the node at the end of a prefix; None stands for the empty prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headstock.spi.arrays import Ints
from headstock.spi.cache import CachePolicy, CacheStats, Inserted, Match
from headstock_radix_cache.check import assert_handle, assert_index, assert_insert
from headstock_radix_cache.options import RadixOptions
from headstock_radix_cache.tree import Index, Node


class RadixCache(CachePolicy):
    """Full pages are shared by all requests of a namespace that begin with the same tokens.

    A page's last use is the latest moment at which a hold protected it. Pages idle since longest
    are evicted first.
    """

    def __init__(self, page_size: int, options: RadixOptions | None = None) -> None:
        """A policy for pages of `page_size` tokens."""
        options = options or RadixOptions()
        self.page_size = page_size
        self.max_prefixes = options.max_prefixes
        self.debug = options.debug

    def new_index(self) -> Index:
        """An empty index."""
        return Index()

    def match_prefix(self, index: Index, tokens: Ints, namespace: str) -> Match:
        """The longest indexed page-aligned true prefix of `tokens`; O(pages found).

        tokens: [n] int32
        """
        node = index.roots.get(namespace)
        pages: list[int] = []
        if node is not None and self.max_prefixes != 0:
            # Keys are bytes: a slice and a hash a page, without an object for each token.
            data = tokens.tobytes()
            width = self.page_size * tokens.itemsize
            for start in range(0, len(data) - width + 1, width):
                child = node.children.get(data[start : start + width])
                if child is None:
                    break
                node = child
                pages.append(node.page)
        return Match(np.array(pages, np.int32), node if pages else None)

    def hold(self, index: Index, handle: Node | None) -> None:
        """Keep the pages up to `handle` from eviction; O(1), or O(pages that become held)."""
        if handle is None:
            return
        # Without debug too: it is O(1), and an evicted handle would protect pages that others have
        # by now.
        assert_handle(handle, must_be_held=False)
        index.version += 1
        index.lock(handle)

    def release(self, index: Index, handle: Node | None) -> None:
        """Undo one hold; pages without any then are the most recently used. O(such pages)."""
        if handle is None:
            return
        if self.debug:
            assert_handle(handle, must_be_held=True)
        index.version += 1
        index.unlock(handle)
        if self.max_prefixes is not None:
            index.note_end(handle, self.max_prefixes)

    def insert(
        self, index: Index, handle: Node | None, tokens: Ints, pages: Ints, namespace: str
    ) -> Inserted:
        """Index whole pages that follow `handle`; the hold moves along. O(1) a page.

        tokens: [n * page_size] int32    pages: [n] int32
        """
        if self.debug:
            assert_insert(index, handle, tokens, pages, self.page_size)
        whole = tokens.reshape(-1, self.page_size)
        canonical, (end,) = self.insert_each(
            index, (handle,), (len(pages),), whole, pages, (namespace,)
        )
        return Inserted(canonical, end)

    def insert_each(
        self,
        index: Index,
        handles: Sequence[Node | None],
        counts: Sequence[int],
        tokens: Ints,
        pages: Ints,
        namespaces: Sequence[str],
    ) -> tuple[Ints, list[Node | None]]:
        """Index `counts[i]` pages that follow `handles[i]`; the holds move along. O(1) a page.

        tokens: [sum of counts, page_size] int32    pages: [sum of counts] int32
        """
        # Once for all rows of a step: page by page an insert takes 2.0 us (decision 0013).
        data, width = tokens.tobytes(), self.page_size * tokens.itemsize
        page_list = pages.tolist()
        canonical: list[int] = []
        ends: list[Node | None] = []
        stop = 0
        for handle, count, namespace in zip(handles, counts, namespaces, strict=True):
            start, stop = stop, stop + count
            if self.debug:
                assert_insert(
                    index, handle, tokens[start:stop].ravel(), pages[start:stop], self.page_size
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
        return pages if canonical == page_list else np.array(canonical, np.int32), ends

    def evict(self, index: Index, count: int) -> Ints:
        """Drop up to `count` unheld pages, least recently used first, deepest first; O(count).

        returns: [at most count] int32
        """
        index.version += 1
        count = min(max(count, 0), self.count_evictable(index))
        # Dropped pages first: nothing can match them any more.
        pages = index.dropped[:count]
        del index.dropped[:count]
        pages += [index.pop_oldest() for _ in range(count - len(pages))]
        return np.array(pages, np.int32)

    def count_evictable(self, index: Index) -> int:
        """How many pages are not held; O(1)."""
        return len(index.idle) + len(index.dropped)

    def evict_all(self, index: Index) -> Ints:
        """Drop every unheld page and return them all."""
        return self.evict(index, self.count_evictable(index))

    def stats(self, index: Index) -> CacheStats:
        """The counts of the index."""
        return CacheStats(
            pages=index.size + len(index.dropped),
            held=index.size - len(index.idle),
        )

    def check_index(self, index: Index) -> None:
        """Raise AssertionError with a reason when the index contradicts itself; O(pages)."""
        assert_index(index, self.page_size)

    def indexed_pages(self, index: Index) -> Ints:
        """Every page the index holds, in no order; O(pages)."""
        return np.array([node.page for node in index.iter_nodes()] + index.dropped, np.int32)
