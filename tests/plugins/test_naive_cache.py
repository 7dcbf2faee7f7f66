"""The policy that keeps nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstock.spi import CacheStats
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
    policy = NaiveCache(page_size)
    index = policy.new_index()
    count = len(tokens) // page_size
    whole = np.array(tokens[: count * page_size], np.int32)
    pages = np.arange(1, count + 1, dtype=np.int32)
    inserted = policy.insert(index, None, whole, pages, namespace)
    policy.hold(index, inserted.handle)
    assert inserted.canonical.tolist() == pages.tolist()
    assert len(policy.match_prefix(index, whole, namespace).pages) == 0
    policy.release(index, inserted.handle)
    policy.check_index(index)
    assert policy.match_prefix(index, whole, namespace).handle is None
    assert (
        policy.count_evictable(index)
        == len(policy.evict(index, 5))
        == len(policy.evict_all(index))
        == 0
    )
    assert len(policy.indexed_pages(index)) == 0
    assert policy.stats(index) == CacheStats(pages=0, held=0)
