"""The entry point of `triton`."""

from __future__ import annotations

from headstock.spi import (
    DeviceRange,
    LayoutKind,
    OpsCapabilities,
    OpsSpec,
    Require,
    SpiRange,
    WeightKind,
)

VERSIONS = ">=3.6,<4"


def spec() -> OpsSpec:
    """The spec of `triton`."""
    return OpsSpec(
        name="triton",
        spi=SpiRange(0, 3),
        summary="fused Triton kernels, for CUDA",
        implementation="headstock_triton.ops:TritonOps",
        options="headstock_triton.options:TritonOptions",
        requires=(
            Require(
                import_name="triton",
                distribution="triton",
                version=VERSIONS,
                hint=f"pip install 'triton{VERSIONS}' (the CUDA builds of torch bring it)",
            ),
        ),
        capabilities=OpsCapabilities(
            devices=(DeviceRange("cuda", (8, 0)),),
            dtypes=frozenset({"bfloat16", "float16", "float32"}),
            layouts=frozenset(LayoutKind),
            formats=frozenset(WeightKind),
        ),
    )
