"""The radix policy: what it keeps, in which order it forgets, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from often import count_examples

from headstock.spi import FullKV, KVGroup
from headstock_radix_cache.options import RadixOptions
from headstock_radix_cache.plugin import spec
from headstock_radix_cache.policy import RadixCache

FULL = (KVGroup(layers=(0,), layout=FullKV(kv_heads=1, k_dim=1, v_dim=1)),)
TOKENS = st.lists(st.integers(0, 1), max_size=8).map(tuple)


def ints(values: Any) -> np.ndarray:
    """The values as the contract wants them."""
    return np.array(values, np.int32)


def finished(policy: RadixCache, index: Any, tokens: tuple[int, ...], first_page: int) -> None:
    """Run one request of these whole pages from match to release, its new pages numbered from
    `first_page`.
    """
    match = policy.match_prefix(index, ints(tokens), "")
    policy.hold(index, match.handle)
    rest = ints(tokens[match.pages.size * policy.page_size :])
    pages = first_page + np.arange(len(rest) // policy.page_size, dtype=np.int32)[None]
    policy.release(index, policy.insert(index, match.handle, rest, pages, "").handle)


@pytest.mark.feature("T13", "T17")
@given(
    limit=st.integers(0, 3),
    requests=st.lists(st.lists(st.integers(0, 1), max_size=4).map(tuple), max_size=12),
)
@settings(max_examples=count_examples(450))
def test_at_most_max_prefixes_finished_prefixes_are_found(
    limit: int, requests: list[tuple[int, ...]]
) -> None:
    policy = RadixCache(1, FULL, RadixOptions(max_prefixes=limit, debug=True))
    index = policy.new_index()
    ends: list[tuple[int, ...]] = []
    for number, tokens in enumerate(requests):
        finished(policy, index, tokens, 1 + number * 4)
        policy.check_index(index)
        ends = [end for end in ends if end != tokens] + [tokens] * bool(tokens)
        ends = ends[max(len(ends) - limit, 0) :]
        for asked in requests:
            stops = range(1, len(asked) + 1)
            kept = [stop for stop in stops if any(end[:stop] == asked[:stop] for end in ends)]
            assert policy.match_prefix(index, ints(asked), "").pages.size == len(kept)
    pages = policy.indexed_pages(index, 0).tolist()
    assert sorted(policy.evict(index, 0, 1000)[0].tolist()) == sorted(pages)
    assert policy.count_evictable(index, 0) == 0


@pytest.mark.feature("T17")
@given(
    limit=st.integers(0, 2), requests=st.lists(st.tuples(TOKENS, st.integers(0, 3)), max_size=12)
)
@settings(max_examples=count_examples(300))
def test_the_limit_holds_between_evictions(
    limit: int, requests: list[tuple[tuple[int, ...], int]]
) -> None:
    policy = RadixCache(1, FULL, RadixOptions(max_prefixes=limit, debug=True))
    index = policy.new_index()
    for number, (tokens, count) in enumerate(requests):
        finished(policy, index, tokens, 1 + number * 8)
        room = policy.count_evictable(index, 0)
        assert room == len(policy.indexed_pages(index, 0))
        assert len(policy.evict(index, 0, count)[0]) == min(count, room)
        policy.check_index(index)
        leaves = [node for node in index.iter_nodes() if not node.children]
        assert len(leaves) <= limit


def test_the_least_recently_used_prefix_goes_first_and_its_end_before_its_beginning() -> None:
    policy = RadixCache(2, FULL)
    index = policy.new_index()
    finished(policy, index, (1, 1, 2, 2), 1)
    finished(policy, index, (1, 1, 3, 3), 5)
    finished(policy, index, (1, 1, 2, 2), 9)
    assert policy.evict(index, 0, 2)[0].tolist() == [5, 2]
    assert policy.evict(index, 0, 9)[0].tolist() == [1]


def test_a_match_that_was_evicted_before_it_was_held_is_refused() -> None:
    policy = RadixCache(1, FULL)
    index = policy.new_index()
    finished(policy, index, (1,), 1)
    match = policy.match_prefix(index, ints([1]), "")
    policy.evict(index, 0, 1)
    with pytest.raises(AssertionError, match="page 1 was evicted"):
        policy.hold(index, match.handle)


@pytest.mark.parametrize(
    ("tokens", "pages", "reason"),
    [
        ([1, 2, 3], [1, 2], "do not take 3 keys"),
        ([1, 2], [3, 3], "passed twice"),
        ([1], [0], "not a page"),
    ],
)
def test_debug_refuses_what_the_contract_forbids(
    tokens: list[int], pages: list[int], reason: str
) -> None:
    policy = RadixCache(1, FULL, RadixOptions(debug=True))
    with pytest.raises(AssertionError, match=reason):
        policy.insert(policy.new_index(), None, ints(tokens), ints([pages]), "")


def test_debug_notices_a_hold_released_twice() -> None:
    policy = RadixCache(1, FULL, RadixOptions(debug=True))
    index = policy.new_index()
    handle = policy.insert(index, None, ints([1]), ints([[1]]), "").handle
    policy.release(index, handle)
    with pytest.raises(AssertionError, match="is not held"):
        policy.release(index, handle)


def test_check_notices_a_page_indexed_twice() -> None:
    policy = RadixCache(1, FULL)
    index = policy.new_index()
    policy.insert(index, None, ints([1, 2]), ints([[7, 7]]), "")
    with pytest.raises(AssertionError, match="indexed twice"):
        policy.check_index(index)


def test_the_spec_names_the_policy_and_its_options() -> None:
    assert spec().implementation == f"{RadixCache.__module__}:{RadixCache.__name__}"
    assert spec().options == f"{RadixOptions.__module__}:{RadixOptions.__name__}"
    with pytest.raises(ValueError, match="max_prefixes"):
        RadixOptions(max_prefixes=-1)


def test_a_prefix_that_was_partly_evicted_is_still_the_oldest_one() -> None:
    policy = RadixCache(1, FULL, RadixOptions(max_prefixes=2))
    index = policy.new_index()
    finished(policy, index, (0, 0), 1)
    finished(policy, index, (1, 1), 3)
    assert policy.evict(index, 0, 1)[0].tolist() == [2]
    finished(policy, index, (2, 2), 5)
    assert [
        policy.match_prefix(index, ints(tokens), "").pages.size
        for tokens in ((0, 0), (1, 1), (2, 2))
    ] == [0, 2, 2]


def test_namespaces_that_nobody_comes_back_to_leave_nothing_behind() -> None:
    policy = RadixCache(1, FULL)
    index = policy.new_index()
    for tenant in ("a", "b", "\ud800", ""):
        match = policy.match_prefix(index, ints([1, 2]), tenant)
        policy.release(
            index,
            policy.insert(
                index, match.handle, ints([1, 2]), ints([[1, 2]]) + 2 * index.size, tenant
            ).handle,
        )
    assert len(index.roots) == 4

    policy.evict(index, 0, 2)[0]
    assert "a" not in index.roots and policy.match_prefix(index, ints([1, 2]), "b").pages.size == 2
    policy.evict_all(index)
    policy.check_index(index)
    assert not index.roots

    limited = RadixCache(1, FULL, RadixOptions(max_prefixes=1))
    index = limited.new_index()
    for number in range(20):
        handle = limited.insert(
            index, None, ints([7]), ints([[number + 1]]), f"tenant {number}"
        ).handle
        limited.release(index, handle)
    assert len(index.roots) == 1
