"""The policy that keeps nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstock.spi import CacheStats, FullKV, KVGroup
from headstock_naive_cache.plugin import spec
from headstock_naive_cache.policy import NaiveCache


def test_the_spec_says_that_nothing_is_shared() -> None:
    assert spec().name == "naive"
    assert not spec().capabilities.reuse
    assert not spec().capabilities.layouts


@pytest.mark.feature("S16")
@given(
    page_size=st.integers(1, 4),
    tokens=st.lists(st.integers(0, 3), max_size=12),
    namespace=st.text(max_size=2),
)
def test_naive_never_hits(page_size: int, tokens: list[int], namespace: str) -> None:
    group = KVGroup(layers=(0,), layout=FullKV(kv_heads=1, k_dim=1, v_dim=1))
    policy = NaiveCache(page_size, (group, group))
    index = policy.new_index()
    count = len(tokens) // page_size
    whole = np.array(tokens[: count * page_size], np.int32)
    pages = np.arange(2 * count, dtype=np.int32).reshape(2, count) + 1
    inserted = policy.insert(index, None, whole, pages, namespace)
    policy.hold(index, inserted.handle)
    assert inserted.canonical.tolist() == pages.tolist()
    assert policy.match_prefix(index, whole, namespace).pages.shape == (2, 0)
    policy.release(index, inserted.handle)
    policy.check_index(index)
    assert policy.match_prefix(index, whole, namespace).handle is None
    assert [len(pages) for pages in policy.evict_all(index)] == [0, 0]
    for group in (0, 1):
        assert policy.count_evictable(index, group) == 0
        assert [len(pages) for pages in policy.evict(index, group, 5)] == [0, 0]
        assert len(policy.indexed_pages(index, group)) == 0
    assert policy.stats(index) == CacheStats(pages=(0, 0), held=(0, 0))
