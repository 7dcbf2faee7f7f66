"""The entry point of `naive`."""

from __future__ import annotations

from headstock.spi import CacheCapabilities, CacheSpec, IntSet, SpiRange


def spec() -> CacheSpec:
    """The spec of `naive`: any page size, no group indexed, no reuse."""
    return CacheSpec(
        name="naive",
        spi=SpiRange(0, 3),
        summary="keeps nothing after a request ends",
        implementation="headstock_naive_cache.policy:NaiveCache",
        capabilities=CacheCapabilities(
            page_sizes=IntSet.all(), layouts=frozenset(), windows=False, reuse=False
        ),
    )
