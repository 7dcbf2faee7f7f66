"""Prefixes in a tree of pages; of what no row holds, the least often used page goes first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from headstock.spi import CachePolicy, CacheStats, Inserted, KVGroup, Match
from headstock.spi.arrays import Ints


class Entry:
    """A page of tokens: its number in each KV group, and the way to the pages before and after."""

    def __init__(self, pages: list[int], parent: Entry | None, key: Any) -> None:
        self.pages = pages
        self.parent = parent
        self.key = key
        self.children: dict[Any, Entry] = {}
        self.holds = 0  # of this page, and of all that come behind it
        self.uses = 0


class Index:
    """The first pages of each namespace, and the pages that may be evicted."""

    def __init__(self) -> None:
        self.root = Entry([], None, None)
        self.size = self.num_held = self.num_pushed = 0
        # (uses, when it was pushed, entry); one that has changed since then is passed over
        self.heap: list[tuple[int, int, Entry]] = []

    def push(self, entry: Entry) -> None:
        """Note an entry that may be evicted: no row holds it, and nothing comes behind it."""
        if entry.parent is not None and not entry.holds and not entry.children:
            self.num_pushed += 1
            heapq.heappush(self.heap, (entry.uses, self.num_pushed, entry))

    def pop(self) -> Entry:
        """Cut off the entry that was used least often, of several the one idle for longest."""
        while True:
            uses, _, entry = heapq.heappop(self.heap)
            parent = entry.parent
            if parent is not None and not entry.holds and not entry.children and uses == entry.uses:
                del parent.children[entry.key]
                entry.parent = None
                self.size -= 1
                self.push(parent)
                return entry

    def walk(self) -> Iterator[Entry]:
        """Every entry."""
        stack = list(self.root.children.values())
        while stack:
            entry = stack.pop()
            yield entry
            stack.extend(entry.children.values())


class LfuCache(CachePolicy):
    """A handle is the entry at the end of a prefix; None stands for the empty prefix."""

    def __init__(self, page_size: int, groups: Sequence[KVGroup], options: Any = None) -> None:
        self.page_size = page_size
        self.num_groups = len(groups)

    def new_index(self) -> Index:
        return Index()

    def match_prefix(self, index: Index, keys: Ints, namespace: str) -> Match:
        entry, found = index.root, []
        for key in self.split(keys):
            # A tenant's pages begin apart; behind the first page the path tells them apart.
            child = entry.children.get(key if found else (namespace, key))
            if child is None:
                break
            entry = child
            found.append(child.pages)
        return Match(self.to_array(found), entry if found else None)

    def split(self, keys: Ints) -> list[bytes]:
        """The keys of each whole page."""
        whole = keys[: len(keys) // self.page_size * self.page_size]
        return [page.tobytes() for page in whole.reshape(-1, self.page_size)]

    def to_array(self, pages: Sequence[Sequence[int]]) -> Ints:
        """Pages of entries as the contract has them.   returns: [groups, n] int32"""
        return np.array(pages, np.int32).reshape(len(pages), self.num_groups).T

    def hold(self, index: Index, handle: Entry | None) -> None:
        while handle is not None and handle.parent is not None:
            index.num_held += not handle.holds
            handle.holds += 1
            handle.uses += 1
            handle = handle.parent

    def release(self, index: Index, handle: Entry | None) -> None:
        while handle is not None and handle.parent is not None:
            handle.holds -= 1
            index.num_held -= not handle.holds
            index.push(handle)
            handle = handle.parent

    def insert(
        self, index: Index, handle: Entry | None, keys: Ints, pages: Ints, namespace: str
    ) -> Inserted:
        entry, canonical = handle or index.root, []
        for key, numbers in zip(self.split(keys), pages.T.tolist(), strict=True):
            key = (namespace, key) if entry is index.root else key
            child = entry.children.get(key)
            if child is None:
                child = entry.children[key] = Entry(numbers, entry, key)
                index.size += 1
            # The row holds what it inserts; the pages before it are held already.
            index.num_held += not child.holds
            child.holds += 1
            child.uses += 1
            canonical.append(child.pages)
            entry = child
        return Inserted(self.to_array(canonical), entry if entry is not index.root else None)

    def evict(self, index: Index, group: int, count: int) -> Sequence[Ints]:
        count = min(count, self.count_evictable(index, group))
        # An entry has a page in every group, and they go together.
        return tuple(self.to_array([index.pop().pages for _ in range(count)]))

    def count_evictable(self, index: Index, group: int) -> int:
        return index.size - index.num_held

    def evict_all(self, index: Index) -> Sequence[Ints]:
        return self.evict(index, 0, self.count_evictable(index, 0))

    def stats(self, index: Index) -> CacheStats:
        groups = self.num_groups
        return CacheStats(pages=(index.size,) * groups, held=(index.num_held,) * groups)

    def check_index(self, index: Index) -> None:
        entries = list(index.walk())
        assert len(entries) == index.size, f"{len(entries)} entries, counted {index.size}"
        held = sum(entry.holds > 0 for entry in entries)
        assert held == index.num_held, f"{held} held entries, counted {index.num_held}"

    def indexed_pages(self, index: Index, group: int) -> Ints:
        return np.array([entry.pages[group] for entry in index.walk()], np.int32)
