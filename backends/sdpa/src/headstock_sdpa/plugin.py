"""The entry point of `sdpa`."""

from __future__ import annotations

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
EIGHT_BIT = "float8_e4m3fn"


def spec() -> AttentionSpec:
    """The spec of `sdpa`: every phase and shape on CPU and CUDA, never in a graph."""
    return AttentionSpec(
        name="sdpa",
        spi=SpiRange(0, 3),
        summary="plain torch, for any device; the reference",
        implementation="headstock_sdpa.backend:SdpaBackend",
        options="headstock_sdpa.options:SdpaOptions",
        capabilities=AttentionCapabilities(
            phases=frozenset(Phase),
            devices=(DeviceRange("cpu"), DeviceRange("cuda")),
            dtypes=frozenset(
                (dtype, kv_dtype, dtype) for dtype in DTYPES for kv_dtype in (dtype, EIGHT_BIT)
            ),
            layouts=frozenset({LayoutKind.FULL, LayoutKind.LATENT}),
            head_dims=IntSet.all(),
            gqa_ratios=IntSet.all(),
            page_sizes=IntSet.all(),
            mixed_groups=True,
            paged=True,
            contiguous=True,
            # Shapes depend on the host's lengths, which change between steps.
            graph=GraphSupport.NEVER,
            planning=Planning.NONE,
            features=frozenset(
                {
                    Feature.SLIDING_WINDOW,
                    Feature.SOFTCAP,
                    Feature.LSE,
                    Feature.SINKS,
                    Feature.SHARED_PREFIX,
                }
            ),
        ),
    )
