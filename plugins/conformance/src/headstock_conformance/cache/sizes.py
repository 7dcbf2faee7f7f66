"""Cases of many pages, rows and calls, not random, so that each policy gets the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headstock.spi import CachePolicy, KVGroup
from headstock.spi.arrays import Ints

NUM_PAGES = 400
FIRST_PAGE = 70_000
"""The pool of a large GPU has more pages than 16 bits can count."""
NUM_PATHS = 300
NUM_NAMESPACES = 130
NUM_CALLS = 600
LENGTHS = (*range(1, 41), 63, 64, 65, 127, 128, 129, 255, 256, 257, NUM_PAGES)
"""Pages of a requested prefix."""


def make_keys(count: int, seed: int = 0) -> Ints:
    """Keys, mostly distinct."""
    keys: Ints = np.random.default_rng(seed).integers(0, 50_000, count).astype(np.int32)
    return keys


def number_pages(groups: Sequence[KVGroup], first: int, count: int) -> Ints:
    """Pages from `first` on, the same numbers in each group."""
    row = np.arange(first, first + count, dtype=np.int32)
    return np.tile(row, (len(groups), 1))


def insert_path(
    policy: CachePolicy,
    index: Any,
    groups: Sequence[KVGroup],
    keys: Ints,
    pages: Ints,
    namespace: str = "",
    step: int = 1 << 30,
) -> None:
    """Index pages like a row that fills `step` of them at a time, and then ends."""
    size = len(keys) // pages.shape[1]
    match = policy.match_prefix(index, keys[:0], namespace)
    handle, ends = match.handle, list(range(0, pages.shape[1], step))
    policy.hold(index, handle)
    for start in ends:
        stop = min(start + step, pages.shape[1])
        inserted = policy.insert(
            index,
            handle,
            keys[start * size : stop * size],
            pages[:, start:stop].copy(),
            namespace,
        )
        assert np.array_equal(inserted.canonical, pages[:, start:stop]), (
            f"insert answers with other pages for pages {start} to {stop - 1} of a new path"
        )
        handle = inserted.handle
    for number, group in enumerate(groups):
        if group.window is not None:
            policy.release_pages(index, number, pages[number])
    policy.release(index, handle)


def check_match(
    policy: CachePolicy,
    index: Any,
    groups: Sequence[KVGroup],
    keys: Ints,
    pages: Ints,
    namespace: str = "",
) -> None:
    """Raise AssertionError unless the whole path is matched with exactly its pages."""
    count = pages.shape[1]
    size = len(keys) // count
    matched = policy.match_prefix(index, keys, namespace).pages
    assert matched.shape == pages.shape, (
        f"match_prefix finds {matched.shape[-1]} of {count} pages that were inserted"
    )
    for number, group in enumerate(groups):
        first = group.first_kept_page(count * size, size)
        wrong = np.flatnonzero(matched[number, first:] != pages[number, first:])
        assert not len(wrong), (
            f"match_prefix gives another page for page {first + int(wrong[0]) + 1} of {count}"
        )


def check_empty(policy: CachePolicy, index: Any, groups: Sequence[KVGroup], pages: Ints) -> None:
    """Raise AssertionError unless `evict_all` returns all of these pages, and none stays."""
    stats = policy.stats(index)
    assert not any(stats.held), f"stats count {stats.held} held pages, and no row holds one"
    for number in range(len(groups)):
        room = policy.count_evictable(index, number)
        assert room == pages.shape[1], (
            f"count_evictable says {room}, and no row holds one of {pages.shape[1]} pages"
        )
    evicted = policy.evict_all(index)
    for number in range(len(groups)):
        left = policy.indexed_pages(index, number).tolist()
        gone = sorted(evicted[number].tolist())
        assert not left and gone == sorted(pages[number].tolist()), (
            f"evict_all gives {len(gone)} of {pages.shape[1]} pages that no row holds, and "
            f"{len(left)} stay in the index"
        )


def check_long(policy: CachePolicy, groups: Sequence[KVGroup], size: int) -> None:
    """One path of hundreds of pages, filled at once and page by page."""
    keys, pages = make_keys(NUM_PAGES * size), number_pages(groups, FIRST_PAGE, NUM_PAGES)
    for step in (NUM_PAGES, 7, 1):
        index = policy.new_index()
        insert_path(policy, index, groups, keys, pages, step=step)
        has_windows = any(group.window is not None for group in groups)
        for count in [NUM_PAGES] if has_windows else LENGTHS:
            check_match(policy, index, groups, keys[: count * size], pages[:, :count])
        for changed in () if has_windows else LENGTHS:
            other = keys.copy()
            # Another 32-bit number with the same last 16 bits.
            other[changed * size - 1] += 1 << 16
            matched = policy.match_prefix(index, other, "").pages.shape[1]
            assert matched == changed - 1, (
                f"match_prefix finds {matched} pages, and a key of page {changed} is another: "
                f"expected {changed - 1}"
            )
        policy.check_index(index)
        check_empty(policy, index, groups, pages)


def check_wide(policy: CachePolicy, groups: Sequence[KVGroup], size: int) -> None:
    """Hundreds of paths, some with common prefixes, in several namespaces."""
    index, taken = policy.new_index(), 1
    paths = []
    common = make_keys(2 * size)
    for number in range(NUM_NAMESPACES):
        namespace, pages = f"tenant {number}", number_pages(groups, taken, 2)
        matched = policy.match_prefix(index, common, namespace).pages.shape[1]
        assert matched == 0, (
            f"match_prefix finds {matched} pages for {namespace!r}, which others inserted"
        )
        insert_path(policy, index, groups, common, pages, namespace)
        paths.append((common, pages, namespace))
        taken += 2
    for number in range(NUM_PATHS):
        count = 1 + number % 5
        keys, namespace = make_keys(count * size, number + 1), f"tenant {number % NUM_NAMESPACES}"
        pages = number_pages(groups, taken, count)
        insert_path(policy, index, groups, keys, pages, namespace)
        paths.append((keys, pages, namespace))
        taken += count
    for keys, pages, namespace in paths:
        check_match(policy, index, groups, keys, pages, namespace)
    policy.check_index(index)
    check_empty(policy, index, groups, number_pages(groups, 1, taken - 1))


def check_calls(policy: CachePolicy, groups: Sequence[KVGroup], size: int) -> None:
    """Any number of matches without a hold keep nothing; holds end with their releases."""
    index, count = policy.new_index(), 12
    keys, pages = make_keys(count * size), number_pages(groups, 1, count)
    insert_path(policy, index, groups, keys, pages)
    for _ in range(NUM_CALLS):
        check_match(policy, index, groups, keys, pages)
    check_empty(policy, index, groups, pages)
    for number in range(NUM_CALLS):
        # Evicted pages are inserted again, by a row that others match.
        insert_path(policy, index, groups, keys, pages)
        handles = []
        for _ in range(number % 4):
            match = policy.match_prefix(index, keys, "")
            policy.hold(index, match.handle)
            handles.append(match.handle)
        for handle in handles:
            policy.release(index, handle)
        check_empty(policy, index, groups, pages)


def check_partly_held(policy: CachePolicy, groups: Sequence[KVGroup], size: int) -> None:
    """`evict_all` takes every page that no row holds, and leaves the others."""
    for held in (0, 1, 5, 12, 100):
        index, count = policy.new_index(), 120
        keys, pages = make_keys(count * size), number_pages(groups, 1, count)
        insert_path(policy, index, groups, keys, pages)
        match = policy.match_prefix(index, keys[: held * size], "")
        policy.hold(index, match.handle)
        evicted = policy.evict_all(index)
        for number, group in enumerate(groups):
            if group.window is not None:
                continue
            left = sorted(policy.indexed_pages(index, number).tolist())
            wanted = pages[number, : match.pages.shape[1]].tolist()
            gone = sorted(evicted[number].tolist())
            assert left == wanted and sorted(left + gone) == pages[number].tolist(), (
                f"evict_all gives {len(gone)} pages and {len(left)} stay, and a row holds "
                f"{len(wanted)} of {count}"
            )
        policy.release(index, match.handle)
