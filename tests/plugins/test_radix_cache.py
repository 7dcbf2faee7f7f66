"""The radix policy against a dictionary."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from attrs import define, field
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from often import count_examples

from headstock.spi import FullKV, KVGroup
from headstock_radix_cache.options import RadixOptions
from headstock_radix_cache.policy import RadixCache

Path = tuple[str, tuple[int, ...]]
"""A namespace and whole pages of tokens."""


@define
class Model:
    """The indexed prefixes of an index of `page_size`.

    `page` and `used` map each indexed prefix to its last page and to the time of its last use;
    `holds` lists the holds.
    """

    page_size: int
    page: dict[Path, int] = field(factory=dict)
    used: dict[Path, int] = field(factory=dict)
    holds: list[Path] = field(factory=list)
    clock: int = 0

    def prefixes(self, path: Path) -> list[Path]:
        """Every page-aligned prefix of `path` of at least one page, shortest first."""
        namespace, tokens = path
        stops = range(self.page_size, len(tokens) + 1, self.page_size)
        return [(namespace, tokens[:stop]) for stop in stops]

    def match(self, path: Path) -> list[int]:
        """The pages of the longest indexed prefix."""
        return [self.page[prefix] for prefix in self.prefixes(path) if prefix in self.page]

    def insert(self, path: Path, tokens: tuple[int, ...], pages: list[int]) -> list[int]:
        """The canonical pages of `tokens` behind `path`; a hold moves from `path` to the end."""
        longer = (path[0], path[1] + tokens)
        new = self.prefixes(longer)[len(path[1]) // self.page_size :]
        if new:
            if path[1]:
                self.holds.remove(path)
            self.holds.append(longer)
        return [self.page.setdefault(prefix, page) for prefix, page in zip(new, pages, strict=True)]

    def release(self, path: Path) -> None:
        """One hold fewer; its pages were used just now."""
        self.holds.remove(path)
        self.clock += 1
        self.used.update(dict.fromkeys(self.prefixes(path), self.clock))

    def held(self) -> set[Path]:
        """The prefixes that a hold protects."""
        return {prefix for path in self.holds for prefix in self.prefixes(path)}

    def evict(self, count: int) -> list[int]:
        """Take the leaf of oldest use, `count` times, as long as there is one that nobody holds."""
        evicted = []
        for _ in range(count):
            free = self.page.keys() - self.held()
            leaves = [
                a for a in free if not any(a != b and a in self.prefixes(b) for b in self.page)
            ]
            if not leaves:
                break
            oldest = min(leaves, key=lambda leaf: self.used[leaf])
            evicted.append(self.page.pop(oldest))
        return evicted


PAGES = 40
FULL = KVGroup(layers=(0,), layout=FullKV(kv_heads=1, k_dim=1, v_dim=1))
TOKENS = st.lists(st.integers(0, 1), max_size=8).map(tuple)
NAMESPACES = st.sampled_from(["", "tenant"])


def ints(values: Any) -> np.ndarray:
    """The values as the contract wants them."""
    return np.array(values, np.int32)


class Rows(RuleBasedStateMachine):
    """Rows that match, hold, insert page by page, release and evict, as the engine makes them
    do.
    """

    @initialize(page_size=st.integers(1, 3))
    def start(self, page_size: int) -> None:
        self.policy = RadixCache(page_size, (FULL,), RadixOptions(debug=True))
        self.index = self.policy.new_index()
        self.model = Model(page_size)
        self.rows: list[tuple[Path, Any]] = []
        self.free = list(range(1, PAGES + 1))

    @rule(tokens=TOKENS, namespace=NAMESPACES)
    def arrive(self, tokens: tuple[int, ...], namespace: str) -> None:
        version = self.index.version
        match = self.policy.match_prefix(self.index, ints(tokens), namespace)
        assert match.pages.dtype == np.int32
        assert match.pages.tolist()[0] == self.model.match((namespace, tokens))
        assert self.index.version == version
        path = (namespace, tokens[: match.pages.size * self.model.page_size])
        self.policy.hold(self.index, match.handle)
        if path[1]:
            self.model.holds.append(path)
        self.rows.append((path, match.handle))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), count=st.integers(0, 3))
    def fill_pages(self, data: st.DataObject, count: int) -> None:
        count = min(count, len(self.free))
        path, handle = self.rows.pop(data.draw(st.integers(0, len(self.rows) - 1)))
        size = count * self.model.page_size
        tokens = tuple(data.draw(st.lists(st.integers(0, 1), min_size=size, max_size=size)))
        pages = [self.free.pop() for _ in range(count)]
        inserted = self.policy.insert(self.index, handle, ints(tokens), ints([pages]), path[0])
        canonical = self.model.insert(path, tokens, pages)
        assert inserted.canonical.dtype == np.int32
        assert inserted.canonical.tolist() == [canonical]
        self.free += [page for page, kept in zip(pages, canonical, strict=True) if page != kept]
        self.rows.append(((path[0], path[1] + tokens), inserted.handle))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), counts=st.lists(st.integers(1, 2), min_size=1, max_size=4))
    def fill_pages_of_many(self, data: st.DataObject, counts: list[int]) -> None:
        counts = counts[: len(self.rows)]
        if sum(counts) > len(self.free):
            return
        rows = [self.rows.pop() for _ in counts]
        pages = [self.free.pop() for _ in range(sum(counts))]
        page = st.tuples(*[st.integers(0, 1)] * self.model.page_size)
        tokens = [data.draw(page) for _ in pages]
        handles, namespaces = [handle for _, handle in rows], [path[0] for path, _ in rows]
        canonical, ends = self.policy.insert_each(
            self.index, handles, counts, ints(tokens), ints([pages]), namespaces
        )
        assert canonical.dtype == np.int32
        canonical = canonical[0]
        stop = 0
        for (path, _), count, end in zip(rows, counts, ends, strict=True):
            start, stop = stop, stop + count
            new = tuple(chain(*tokens[start:stop]))
            assert canonical[start:stop].tolist() == self.model.insert(path, new, pages[start:stop])
            self.rows.append(((path[0], path[1] + new), end))
        self.free += [
            page for page, kept in zip(pages, canonical.tolist(), strict=True) if page != kept
        ]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def hold_again(self, data: st.DataObject) -> None:
        path, handle = data.draw(st.sampled_from(self.rows))
        self.policy.hold(self.index, handle)
        if path[1]:
            self.model.holds.append(path)
        self.rows.append((path, handle))

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        path, handle = self.rows.pop(data.draw(st.integers(0, len(self.rows) - 1)))
        self.policy.release(self.index, handle)
        if path[1]:
            self.model.release(path)

    @rule(count=st.integers(0, PAGES))
    def evict(self, count: int) -> None:
        expected = self.model.evict(count)
        (evicted,) = self.policy.evict(self.index, 0, count)
        assert evicted.dtype == np.int32
        assert evicted.tolist() == expected
        self.free += expected

    @rule()
    def reset(self) -> None:
        expected = self.model.evict(PAGES)
        (evicted,) = self.policy.evict_all(self.index)
        assert sorted(evicted.tolist()) == sorted(expected)
        self.free += expected

    @invariant()
    def agrees(self) -> None:
        self.policy.check_index(self.index)
        pages = self.policy.indexed_pages(self.index, 0).tolist()
        held = self.model.held()
        stats = self.policy.stats(self.index)
        assert sorted(pages + self.free) == list(range(1, PAGES + 1))
        assert sorted(pages) == sorted(self.model.page.values())
        assert {self.model.page[path] for path in held} <= set(pages)
        assert (stats.pages, stats.held) == ((len(pages),), (len(held),))
        assert self.policy.count_evictable(self.index, 0) == len(pages) - len(held)


@pytest.mark.feature("I24")
def test_radix_locked_pages_never_evicted_and_all_else_as_a_dictionary_would() -> None:
    quick = settings(
        max_examples=count_examples(225),
        stateful_step_count=30,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Rows, settings=quick)
