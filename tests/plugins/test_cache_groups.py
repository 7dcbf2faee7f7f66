"""Cache policies over several KV groups, and over windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from often import count_examples, often
from source_tree import ROOT

from headstock.spi import FullKV, KVGroup, LatentKV, StateKV, StateTensor
from headstock_conformance.cache.rows import CacheRows, ints
from headstock_radix_cache.options import RadixOptions
from headstock_radix_cache.policy import RadixCache

FULL = KVGroup(layers=(0,), layout=FullKV(kv_heads=1, k_dim=1, v_dim=1))
STATE = KVGroup(layers=(3,), layout=StateKV(tensors=(StateTensor("sum", (1,)),), alignment=1))
LATENT = KVGroup(layers=(1,), layout=LatentKV(dim=2, rope_dim=1))


def window(length: int) -> KVGroup:
    """A group that keeps the latest tokens."""
    return KVGroup(layers=(2,), layout=FULL.layout, window=length)


GROUPS = {
    "one full": (FULL,),
    "full and latent": (FULL, LATENT),
    "full and a window": (FULL, window(4)),
    "a window first": (window(2), FULL),
    "two windows": (FULL, window(1), window(6)),
    "a window alone": (window(3),),
    "windows alone": (window(5), window(1)),
    "full and a state": (FULL, STATE),
    "states and a window": (STATE, window(4), FULL, STATE),
}
ORDER = ("full and a state", *(name for name in GROUPS if name != "full and a state"))


@pytest.mark.parametrize("groups", often(3, [(GROUPS[name],) for name in ORDER]), ids=ORDER)
def test_the_longest_prefix_is_found_that_every_group_can_go_on_behind(
    groups: tuple[KVGroup, ...],
) -> None:
    class RadixRows(CacheRows):
        make = staticmethod(lambda size, groups: RadixCache(size, groups, RadixOptions(debug=True)))

    RadixRows.groups = groups
    quick = settings(
        max_examples=count_examples(120),
        stateful_step_count=30,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(RadixRows, settings=quick)


@pytest.mark.parametrize("names", often(1, ["full and latent", "one full"]))
def test_the_example_keeps_the_contract(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs/examples/cache-plugin/src"))
    from headstock_lfu.policy import LfuCache

    class LfuRows(CacheRows):
        make = LfuCache
        groups = GROUPS[names]

    quick = settings(
        max_examples=count_examples(120),
        stateful_step_count=30,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(LfuRows, settings=quick)


def insert(
    policy: RadixCache, index: Any, keys: Sequence[int], pages: Sequence[Sequence[int]]
) -> Any:
    """Insert pages of one key each behind the root; return the handle."""
    return policy.insert(index, None, ints(keys), ints(pages), "").handle


def end(policy: RadixCache, index: Any, handle: Any, pages: Sequence[int], group: int = 1) -> None:
    """End a row that still holds `pages` of a window group."""
    policy.release_pages(index, group, ints(pages))
    policy.release(index, handle)


def test_a_match_ends_where_the_window_is_whole() -> None:
    policy = RadixCache(1, (FULL, window(3)))
    index = policy.new_index()
    # The third page had left the window before it was indexed.
    handle = insert(policy, index, range(8), [range(1, 9), [1, 2, 0, 4, 5, 6, 7, 8]])

    def find(count: int) -> list[list[int]]:
        return policy.match_prefix(index, ints(range(count)), "").pages.tolist()

    assert find(8) == [[*range(1, 9)], [0, 0, 0, 0, 0, 0, 7, 8]]
    assert find(5) == [[1, 2, 3, 4, 5], [0, 0, 0, 4, 5]]
    assert find(4) == find(3) == find(2) == [[1, 2], [1, 2]]
    end(policy, index, handle, [1, 2, 4, 5, 6, 7, 8])
    assert [pages.tolist() for pages in policy.evict(index, 1, 1)] == [[], [1]]
    assert find(4) == [[], []] and find(5) == [[1, 2, 3, 4, 5], [0, 0, 0, 4, 5]]


def test_a_row_that_computes_a_lost_page_again_brings_it_back() -> None:
    policy = RadixCache(1, (FULL, window(2)), RadixOptions(debug=True))
    index = policy.new_index()
    end(policy, index, insert(policy, index, [7, 8], [[1, 2], [1, 2]]), [1, 2])
    policy.evict(index, 1, 1)
    inserted = policy.insert(index, None, ints([7, 8]), ints([[3, 4], [3, 4]]), "")

    assert inserted.canonical.tolist() == [[1, 2], [3, 2]]
    assert policy.match_prefix(index, ints([7]), "").pages.tolist() == [[1], [3]]
    assert policy.count_evictable(index, 0) == policy.count_evictable(index, 1) == 0


def test_leaves_that_nothing_can_be_matched_up_to_give_their_pages_of_all_groups() -> None:
    policy = RadixCache(1, (FULL, window(3)))
    index = policy.new_index()
    end(policy, index, insert(policy, index, [1, 2, 3], [[1, 2, 3], [4, 5, 6]]), [6, 5, 4])

    evicted = policy.evict(index, 1, 1)
    assert [pages.tolist() for pages in evicted] == [[3], [6]]
    assert [pages.tolist() for pages in policy.evict(index, 1, 1)] == [[2], [5]]
    policy.check_index(index)


def test_a_prefix_whose_last_pages_have_left_the_window_keeps_nothing_of_no_use() -> None:
    policy = RadixCache(1, (window(3),), RadixOptions(max_prefixes=1))
    index = policy.new_index()
    handle = insert(policy, index, [1, 2, 3, 4], [[1, 2, 0, 0]])
    end(policy, index, handle, [1, 2], group=0)

    assert policy.match_prefix(index, ints([1, 2, 3, 4]), "").pages.tolist() == [[1, 2]]
    assert index.size == 2 and list(index.ends) == [
        policy.match_prefix(index, ints([1, 2]), "").handle
    ]
    assert [pages.tolist() for pages in policy.evict_all(index)] == [[1, 2]]
    assert not index.size and not index.roots and not index.ends


def test_prefixes_beyond_the_limit_wait_to_be_evicted_in_every_group() -> None:
    policy = RadixCache(1, (FULL, window(2)), RadixOptions(max_prefixes=1, debug=True))
    index = policy.new_index()
    end(policy, index, insert(policy, index, [1, 2], [[1, 2], [1, 2]]), [1, 2])
    end(policy, index, insert(policy, index, [3, 4], [[3, 4], [3, 4]]), [3, 4])

    assert policy.match_prefix(index, ints([1, 2]), "").pages.shape == (2, 0)
    assert policy.stats(index).pages == (4, 4) and policy.count_evictable(index, 1) == 4
    assert [pages.tolist() for pages in policy.evict(index, 1, 2)] == [[], [2, 1]]
    with pytest.raises(AssertionError, match="waiting to be evicted"):
        insert(policy, index, [9], [[1], [9]])
    policy.check_index(index)


def test_debug_notices_pages_that_were_not_held() -> None:
    policy = RadixCache(1, (FULL, window(2)), RadixOptions(debug=True))
    index = policy.new_index()
    insert(policy, index, [1], [[1], [1]])
    with pytest.raises(AssertionError, match="page 7 of group 1 is not indexed"):
        policy.release_pages(index, 1, ints([7]))
    policy.release_pages(index, 1, ints([1]))
    with pytest.raises(AssertionError, match="page 1 of group 1 is not held"):
        policy.release_pages(index, 1, ints([1]))


def test_a_match_ends_at_a_snapshot_and_what_lies_behind_the_last_one_goes_with_its_row() -> None:
    policy = RadixCache(1, (FULL, STATE), RadixOptions(debug=True))
    index = policy.new_index()
    handle = insert(policy, index, range(5), [range(1, 6), [0] * 5])
    for num_pages, page in ((2, 7), (3, 8)):
        assert policy.add_snapshot(index, handle, num_pages, ints([0, page])).tolist() == [0, page]
    match = policy.match_prefix(index, ints(range(5)), "")

    assert match.pages.tolist() == [[1, 2, 3], [0, 0, 8]] and match.num_known == 5
    policy.release(index, handle)
    # No match can end at the fourth page, nor at the fifth.
    assert policy.evict(index, 0, 1)[0].tolist() == [5]
    assert policy.stats(index).pages == (4, 2)
    policy.check_index(index)


def test_the_snapshot_that_was_used_last_goes_last() -> None:
    policy = RadixCache(1, (FULL, STATE), RadixOptions(debug=True))
    index = policy.new_index()
    handle = insert(policy, index, range(3), [range(1, 4), [0] * 3])
    for num_pages in (1, 2, 3):
        policy.add_snapshot(index, handle, num_pages, ints([0, num_pages]))
    first = policy.match_prefix(index, ints([0]), "").handle
    policy.hold(index, first)

    assert [pages.tolist() for pages in policy.evict(index, 1, 2)] == [[], [2, 3]]
    assert policy.match_prefix(index, ints(range(3)), "").pages.tolist() == [[1], [1]]
    policy.release(index, first)
    policy.release(index, handle)
    policy.check_index(index)


def test_debug_notices_snapshots_of_no_prefix() -> None:
    policy = RadixCache(1, (FULL, STATE), RadixOptions(debug=True))
    index = policy.new_index()
    handle = insert(policy, index, [1, 2], [[1, 2], [0, 0]])
    with pytest.raises(AssertionError, match="3 pages of 2 are not a prefix"):
        policy.add_snapshot(index, handle, 3, ints([0, 1]))
    policy.add_snapshot(index, handle, 2, ints([0, 1]))
    with pytest.raises(AssertionError, match="page 1 is in the index already"):
        policy.add_snapshot(index, handle, 1, ints([0, 1]))
