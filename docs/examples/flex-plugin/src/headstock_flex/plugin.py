"""The spec of `flex`: what it serves. Whatever it does not claim is refused at the start."""

from headstock.spi import (
    AttentionCapabilities,
    AttentionSpec,
    DeviceRange,
    Feature,
    GraphSupport,
    IntSet,
    LayoutKind,
    Phase,
    Planning,
    SpiRange,
)

DTYPES = ("float32", "bfloat16", "float16")


def spec() -> AttentionSpec:
    """Every phase, windows, softcaps and LSE, on CPU and CUDA; no CUDA graphs."""
    return AttentionSpec(
        name="flex",
        spi=SpiRange(0, 3),
        summary="torch's FlexAttention, compiled where there is a GPU",
        implementation="headstock_flex.backend:FlexBackend",
        options="headstock_flex.options:FlexOptions",
        capabilities=AttentionCapabilities(
            phases=frozenset(Phase),
            devices=(DeviceRange("cpu"), DeviceRange("cuda", (8, 0))),
            dtypes=frozenset((dtype, dtype, dtype) for dtype in DTYPES),
            layouts=frozenset({LayoutKind.FULL}),
            head_dims=IntSet.of(16, 32, 64, 128, 256),
            gqa_ratios=IntSet.all(),
            page_sizes=IntSet.all(),
            mixed_groups=True,
            paged=True,
            contiguous=True,
            # Shapes and masks follow from the host's lengths.
            graph=GraphSupport.NEVER,
            planning=Planning.NONE,
            features=frozenset({Feature.SLIDING_WINDOW, Feature.SOFTCAP, Feature.LSE}),
        ),
    )
