"""The spec of `rowwise`: what it serves. Whatever it does not claim is refused at the start."""

from headstock.spi import (
    AttentionCapabilities,
    AttentionSpec,
    DeviceRange,
    GraphSupport,
    IntSet,
    LayoutKind,
    Phase,
    Planning,
    SpiRange,
)

DTYPES = ("float32", "bfloat16", "float16")


def spec() -> AttentionSpec:
    """Every phase and shape on CPU and CUDA, without windows, softcaps and CUDA graphs."""
    return AttentionSpec(
        name="rowwise",
        spi=SpiRange(0, 3),
        summary="one row after another, to start a backend from",
        implementation="headstock_rowwise.backend:RowwiseBackend",
        capabilities=AttentionCapabilities(
            phases=frozenset(Phase),
            devices=(DeviceRange("cpu"), DeviceRange("cuda")),
            dtypes=frozenset((dtype, dtype, dtype) for dtype in DTYPES),
            layouts=frozenset({LayoutKind.FULL}),
            head_dims=IntSet.all(),
            gqa_ratios=IntSet.all(),
            page_sizes=IntSet.all(),
            mixed_groups=True,
            paged=True,
            contiguous=True,
            graph=GraphSupport.NEVER,
            planning=Planning.NONE,
            features=frozenset(),
        ),
    )
