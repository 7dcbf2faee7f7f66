"""The entry point of `triton`."""

from __future__ import annotations

from attrs import evolve

from headstock.spi import (
    AttentionCapabilities,
    AttentionQuery,
    AttentionSpec,
    DeviceEnv,
    DeviceRange,
    Feature,
    GraphSupport,
    IntSet,
    LayoutKind,
    Phase,
    Planning,
    Require,
    SpiRange,
)

VERSIONS = ">=3.6,<4"

EIGHT_BIT_KV = ("bfloat16", "float8_e4m3fn", "bfloat16")
"""Read as 8 bits and computed with as bfloat16, from sm_89 on."""

CAPABILITIES = AttentionCapabilities(
    phases=frozenset(Phase),
    devices=(DeviceRange("cuda", (8, 0)),),
    dtypes=frozenset(
        {(dtype,) * 3 for dtype in ("bfloat16", "float16", "float32")} | {EIGHT_BIT_KV}
    ),
    layouts=frozenset({LayoutKind.FULL}),
    head_dims=IntSet.multiples(8, 512),
    gqa_ratios=IntSet.all(),
    page_sizes=IntSet.all(),
    mixed_groups=True,
    paged=True,
    contiguous=True,
    graph=GraphSupport.ALWAYS,
    planning=Planning.NONE,
    features=frozenset({Feature.SLIDING_WINDOW, Feature.SOFTCAP, Feature.LSE, Feature.SINKS}),
)


def spec() -> AttentionSpec:
    """The spec of `triton`."""
    return AttentionSpec(
        name="triton",
        spi=SpiRange(0, 3),
        summary="a Triton kernel, for CUDA; heads of up to 512",
        implementation="headstock_triton_attn.backend:TritonBackend",
        requires=(
            Require(
                import_name="triton",
                distribution="triton",
                version=VERSIONS,
                hint=f"pip install 'triton{VERSIONS}' (the CUDA builds of torch bring it)",
            ),
        ),
        resolve="headstock_triton_attn.plugin:resolve",
        capabilities=CAPABILITIES,
    )


def resolve(query: AttentionQuery, env: DeviceEnv) -> AttentionCapabilities:
    """The capabilities on this machine: 8-bit KV needs the conversions of sm_89 and later."""
    if env.capability is not None and env.capability < (8, 9):
        return evolve(CAPABILITIES, dtypes=CAPABILITIES.dtypes - {EIGHT_BIT_KV})
    return CAPABILITIES
