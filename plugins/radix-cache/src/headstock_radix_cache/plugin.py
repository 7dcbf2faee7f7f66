"""The entry point of `radix`."""

from __future__ import annotations

from headstock.spi import CacheCapabilities, CacheSpec, IntSet, LayoutKind, SpiRange


def spec() -> CacheSpec:
    """The spec of `radix`: any page size, every group, reuse."""
    return CacheSpec(
        name="radix",
        spi=SpiRange(0, 3),
        summary="shares common prefixes page by page, evicts the least recently used",
        implementation="headstock_radix_cache.policy:RadixCache",
        options="headstock_radix_cache.options:RadixOptions",
        capabilities=CacheCapabilities(
            page_sizes=IntSet.all(),
            layouts=frozenset(LayoutKind),
            windows=True,
            reuse=True,
        ),
    )
