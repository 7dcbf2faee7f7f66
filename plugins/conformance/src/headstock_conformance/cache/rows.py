"""Rows that use a cache policy like core, and the contract's guarantees for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from attrs import define
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headstock.spi import CachePolicy, KVGroup, LayoutKind

Path = tuple[str, tuple[int, ...]]
"""A namespace and whole pages of keys."""
PAGES = 40
KEYS = st.lists(st.integers(0, 1), max_size=9).map(tuple)
NAMESPACES = st.sampled_from(["", "tenant"])


def ints(values: Any) -> np.ndarray:
    """The values as the contract requires them."""
    return np.array(values, np.int32)


def check_pages(call: str, pages: np.ndarray, shape: tuple[int, ...]) -> None:
    """Raise AssertionError unless pages are as the contract requires."""
    assert isinstance(pages, np.ndarray), f"{call}: expected an array, got a {type(pages).__name__}"
    assert pages.dtype == np.int32, f"{call}: expected int32 pages, got {pages.dtype}"
    assert pages.shape == shape, f"{call}: expected pages of shape {shape}, got {pages.shape}"


@define
class Row:
    """A row: its path, and its page of each group and column, 0 if it was freed."""

    path: Path
    handle: Any
    pages: list[list[int]]


class CacheRows(RuleBasedStateMachine):
    """Rows that match, hold, insert, move windows on, leave snapshots, end and evict.

    They do so for a policy and its groups.

    The path of each page is known from its insertion. The pages therefore determine what a policy
    may match, whatever it evicts first.
    """

    groups: ClassVar[tuple[KVGroup, ...]]
    make: ClassVar[Callable[[int, Sequence[KVGroup]], CachePolicy]]
    page_sizes: ClassVar[tuple[int, ...]] = (1, 2, 3)

    @initialize(size=st.integers(0, 2))
    def start(self, size: int) -> None:
        page_size = self.size = self.page_sizes[size % len(self.page_sizes)]
        self.policy = type(self).make(page_size, self.groups)
        self.index = self.policy.new_index()
        self.rows: list[Row] = []
        # By group: the free pages, how many rows hold each page, and the path of each page.
        self.free = [list(range(1, PAGES + 1)) for _ in self.groups]
        self.refs = [dict.fromkeys(range(1, PAGES + 1), 0) for _ in self.groups]
        self.paths: list[dict[int, Path]] = [{} for _ in self.groups]
        self.states = [
            number
            for number, group in enumerate(self.groups)
            if group.layout.kind is LayoutKind.STATE
        ]

    def find_first(self, group: int, count: int) -> int:
        """The first page of a group that a row needs which goes on behind `count` pages."""
        if group in self.states:
            return max(count - 1, 0)
        return self.groups[group].first_kept_page(count * self.size, self.size)

    def find_kept(self, path: Path) -> int:
        """The number of pages of the path after which a new row can continue, given the index."""
        has = [
            {self.paths[group][page] for page in self.indexed(group)}
            for group in range(len(self.groups))
        ]
        namespace, keys = path
        prefixes = [(namespace, keys[: stop * self.size]) for stop in self.stops(keys)]

        def can_go_on(count: int) -> bool:
            return all(
                prefixes[at] in has[group]
                for group in range(len(self.groups))
                for at in range(self.find_first(group, count), count)
            )

        return max([0, *(count for count in self.stops(keys) if can_go_on(count))])

    def stops(self, keys: tuple[int, ...]) -> range:
        """The numbers of whole pages of the keys, from 1."""
        return range(1, len(keys) // self.size + 1)

    def indexed(self, group: int) -> list[int]:
        """The pages of a group in the index."""
        pages: list[int] = self.policy.indexed_pages(self.index, group).tolist()
        return pages

    @rule(keys=KEYS, namespace=NAMESPACES)
    def arrive(self, keys: tuple[int, ...], namespace: str) -> None:
        match = self.policy.match_prefix(self.index, ints(keys), namespace)
        count = match.pages.shape[-1]
        check_pages("match_prefix", match.pages, (len(self.groups), count))
        num_indexed = self.find_kept((namespace, keys))
        again = self.policy.match_prefix(self.index, ints(keys), namespace)
        assert again.handle is match.handle and np.array_equal(again.pages, match.pages), (
            "match_prefix gives another result when called again"
        )
        self.policy.hold(self.index, match.handle)
        row = Row((namespace, keys[: count * self.size]), match.handle, match.pages.tolist())
        for number in range(len(self.groups)):
            first, pages = self.find_first(number, count), row.pages[number]
            assert not any(pages[:first]), (
                f"match_prefix gives pages behind group {number}'s window"
                if number not in self.states
                else f"match_prefix gives states of group {number} before its end"
            )
            assert all(pages[first:]), f"match_prefix lacks a page of group {number}"
            for at in range(first, count):
                self.check_match(number, pages[at], (namespace, keys[: (at + 1) * self.size]))
        assert count == num_indexed, (
            f"match_prefix finds {count} pages of a prefix of which {num_indexed} are indexed"
        )
        assert match.num_known >= count or not self.states, (
            f"match_prefix knows {match.num_known} pages, and finds {count}"
        )
        for number in self.states:
            row.pages[number] = [0] * count  # copied, not held
        for number, pages in enumerate(row.pages):
            self.hold_all(number, [page for page in pages if page])
        self.rows.append(row)

    def check_match(self, group: int, page: int, path: Path) -> None:
        """Raise AssertionError unless the page is one of this namespace and these keys."""
        own = self.paths[group].get(page)
        assert own is not None, f"match_prefix gives page {page}, which was never inserted"
        assert own[0] == path[0], (
            f"match_prefix gives a page of another namespace: {own[0]!r} for {path[0]!r}"
        )
        assert own[1] == path[1], (
            f"match_prefix gives a page of other keys: {list(own[1])} for {list(path[1])}"
        )

    def hold_all(self, group: int, pages: list[int]) -> None:
        """One more row holds the pages."""
        unheld = [page for page in pages if not self.refs[group][page]]
        if self.groups[group].window is not None and unheld:
            self.policy.hold_pages(self.index, group, ints(unheld))
        for page in pages:
            self.refs[group][page] += 1

    def let_go(self, row: Row, group: int, end: int) -> None:
        """The row no longer holds pages of the group before column `end`."""
        pages = [page for page in row.pages[group][:end] if page]
        row.pages[group][:end] = [0] * end
        for page in pages:
            self.refs[group][page] -= 1
        unheld = [page for page in pages if not self.refs[group][page]]
        if self.groups[group].window is not None and unheld:
            self.policy.release_pages(self.index, group, ints(unheld))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), counts=st.lists(st.integers(0, 3), min_size=1, max_size=3))
    def fill_pages(self, data: st.DataObject, counts: list[int]) -> None:
        counts = counts[: len(self.rows)]
        if sum(counts) > min(map(len, self.free)):
            return
        rows = [self.rows.pop() for _ in counts]
        page = st.tuples(*[st.integers(0, 1)] * self.size)
        keys = [data.draw(page) for _ in range(sum(counts))]
        own = np.zeros((len(self.groups), len(keys)), np.int32)
        at = 0
        for row, count in zip(rows, counts, strict=True):
            before = len(row.pages[0])
            for number, group in enumerate(self.groups):
                if number in self.states:
                    continue
                # Under overlap a page may leave the window before it is indexed.
                late = data.draw(st.booleans()) if group.window is not None else False
                end = (before + count) * self.size
                first = group.first_kept_page(end, self.size) - before if late else 0
                for column in range(max(first, 0), count):
                    own[number, at + column] = self.free[number].pop()
            at += count
        canonical, ends = self.policy.insert_each(
            self.index,
            [row.handle for row in rows],
            counts,
            ints(keys).reshape(-1, self.size),
            own.copy(),
            [row.path[0] for row in rows],
        )
        check_pages("insert", canonical, own.shape)
        assert ((canonical == 0) == (own == 0)).all(), (
            "insert answers 0 for a page, or a page for 0"
        )
        at = 0
        for row, count, end in zip(rows, counts, ends, strict=True):
            for column in range(at, at + count):
                row.path = (row.path[0], row.path[1] + keys[column])
                for number in range(len(self.groups)):
                    self.take(row, number, int(own[number, column]), int(canonical[number, column]))
            row.handle, at = end, at + count
            self.rows.append(row)

    def take(self, row: Row, group: int, own: int, canonical: int) -> None:
        """The row gets the canonical page of its path, and frees its own page if that differs."""
        row.pages[group].append(canonical)
        if not own:
            return
        if own != canonical:
            assert self.paths[group].get(canonical) == row.path, (
                "insert says that a page of other keys is the canonical one"
            )
            self.free[group].append(own)
        self.paths[group][canonical] = row.path
        self.refs[group][canonical] += 1

    @precondition(lambda self: self.states and any(row.path[1] for row in self.rows))
    @rule(data=st.data())
    def leave_snapshot(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from([row for row in self.rows if row.path[1]]))
        num_pages = data.draw(st.integers(1, len(row.path[1]) // self.size))
        if not all(self.free[group] for group in self.states):
            return
        own = np.zeros(len(self.groups), np.int32)
        own[self.states] = [self.free[group].pop() for group in self.states]
        canonical = self.policy.add_snapshot(self.index, row.handle, num_pages, own.copy())
        check_pages("add_snapshot", canonical, own.shape)
        assert ((canonical == 0) == (own == 0)).all(), (
            "add_snapshot answers 0 for a page, or a page for 0"
        )
        path = row.path[0], row.path[1][: num_pages * self.size]
        for group in self.states:
            if canonical[group] == own[group]:
                self.paths[group][int(own[group])] = path
                continue
            self.free[group].append(int(own[group]))
            assert self.paths[group].get(int(canonical[group])) == path, (
                "add_snapshot says that the state behind other keys is the canonical one"
            )

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def move_on(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.rows))
        for number, group in enumerate(self.groups):
            self.let_go(row, number, group.first_kept_page(len(row.path[1]), self.size))

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        row = self.rows.pop(data.draw(st.integers(0, len(self.rows) - 1)))
        for number in range(len(self.groups)):
            self.let_go(row, number, len(row.pages[number]))
        self.policy.release(self.index, row.handle)

    @rule(data=st.data(), count=st.integers(0, PAGES))
    def evict(self, data: st.DataObject, count: int) -> None:
        group = data.draw(st.integers(0, len(self.groups) - 1))
        room = self.policy.count_evictable(self.index, group)
        evicted = self.policy.evict(self.index, group, count)
        assert len(evicted[group]) >= min(count, room), (
            f"evict gives {len(evicted[group])} of {count} pages, and {room} can be evicted"
        )
        self.free_all(evicted)

    @rule()
    def reset(self) -> None:
        self.free_all(self.policy.evict_all(self.index))
        for group in range(len(self.groups)):
            assert self.policy.count_evictable(self.index, group) == 0, (
                "pages can be evicted after evict_all"
            )

    def free_all(self, evicted: Sequence[np.ndarray]) -> None:
        """Free the evicted pages of each group; no row holds them."""
        assert len(evicted) == len(self.groups), "evict answers for another number of groups"
        for group, pages in enumerate(evicted):
            check_pages("evict", pages, pages.shape[-1:])
            held_pages = [page for page in pages.tolist() if self.refs[group][page]]
            assert not held_pages, (
                f"pages {held_pages} of group {group} were evicted and rows hold them"
            )
            self.free[group] += pages.tolist()

    @invariant()
    def agrees(self) -> None:
        try:
            self.policy.check_index(self.index)
        except AssertionError as error:
            raise AssertionError(f"check_index says: {error}") from error
        stats = self.policy.stats(self.index)
        for group, refs in enumerate(self.refs):
            pages = self.indexed(group)
            # Every page that a row holds is indexed here, as core's full pages are.
            assert sorted(pages + self.free[group]) == list(range(1, PAGES + 1)), (
                "a page is lost, or indexed and free at once"
            )
            held_pages = {page for page, count in refs.items() if count}
            assert held_pages <= set(pages), "a page that a row holds is no longer indexed"
            counts = stats.pages[group], stats.held[group]
            assert counts == (len(pages), len(held_pages)), (
                f"stats: expected {(len(pages), len(held_pages))} indexed and held pages, got "
                f"{counts}"
            )
            unheld = len(pages) - len(held_pages)
            evictable = self.policy.count_evictable(self.index, group)
            assert evictable == unheld, (
                f"count_evictable says {evictable}, and no row holds {unheld} indexed pages"
            )
