"""The spec of `lfu`: what it indexes. A model with anything else runs without reuse."""

from headstock.spi import CacheCapabilities, CacheSpec, IntSet, LayoutKind, SpiRange


def spec() -> CacheSpec:
    """Pages of any size, in any number of groups that keep all tokens."""
    return CacheSpec(
        name="lfu",
        spi=SpiRange(0, 3),
        summary="shares common prefixes, evicts the least often used",
        implementation="headstock_lfu.policy:LfuCache",
        capabilities=CacheCapabilities(
            page_sizes=IntSet.all(),
            layouts=frozenset({LayoutKind.FULL, LayoutKind.LATENT}),
            windows=False,
            reuse=True,
        ),
    )
