"""The entry point of `fi`."""

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
    LatentKV,
    LayoutKind,
    Phase,
    Planning,
    Rejection,
    Require,
    SpiRange,
)

DISTRIBUTION = "flashinfer-python"
REQUIRE = Require(
    import_name="flashinfer", distribution=DISTRIBUTION, version=">=0.6.18.post1,<0.8"
)

LATENT_WIDTHS = (512, 64)
"""Widths of latent vectors: the part for keys and values, and the position part."""

CAPABILITIES = AttentionCapabilities(
    phases=frozenset(Phase),
    devices=(DeviceRange("cuda", (8, 0)),),
    dtypes=frozenset(
        {
            ("bfloat16", "bfloat16", "bfloat16"),
            ("float16", "float16", "float16"),
            ("bfloat16", "float8_e4m3fn", "bfloat16"),
        }
    ),
    layouts=frozenset({LayoutKind.FULL, LayoutKind.LATENT}),
    head_dims=IntSet.of(64, 128, 256),
    gqa_ratios=IntSet.all(),
    page_sizes=IntSet.all(),
    mixed_groups=False,
    paged=True,
    contiguous=True,
    graph=GraphSupport.DECODE,
    # For 256 rows, `plan` takes 667 us on an H200's host with tensor cores and 170 without; `fa`
    # takes 4.
    planning=Planning.PER_STEP,
    features=frozenset({Feature.LSE, Feature.SINKS, Feature.SLIDING_WINDOW}),
)


def spec() -> AttentionSpec:
    """The spec of `fi`."""
    return AttentionSpec(
        name="fi",
        spi=SpiRange(0, 3),
        summary="FlashInfer, for CUDA; plans each step on the host",
        implementation="headstock_fi.make:make_backend",
        requires=(REQUIRE,),
        options="headstock_fi.options:FlashInferOptions",
        resolve="headstock_fi.plugin:resolve",
        capabilities=CAPABILITIES,
    )


def resolve(query: AttentionQuery, env: DeviceEnv) -> AttentionCapabilities | tuple[Rejection, ...]:
    """The capabilities on this machine: 8-bit KV needs the conversions of sm_89 and later."""
    if DISTRIBUTION not in env.distributions:
        hint = f"pip install '{DISTRIBUTION}{REQUIRE.version}'"
        return (Rejection(code="missing", message=f"{DISTRIBUTION} is not installed", hint=hint),)
    wide = frozenset(triple for triple in CAPABILITIES.dtypes if triple[0] == triple[1])
    latent = [group.layout for group in query.groups if isinstance(group.layout, LatentKV)]
    if any((layout.out_dim, layout.rope_dim) != LATENT_WIDTHS for layout in latent):
        widths = f"{latent[0].out_dim} with {latent[0].rope_dim} for the position"
        wanted = "{} with {}".format(*LATENT_WIDTHS)
        return (
            Rejection(
                code="layout",
                message=f"latent vectors of {widths} are not supported; supported: {wanted}",
                hint="Set attn (--attn) to sdpa.",
            ),
        )
    if latent:
        # Its kernels were not tested with regions or 8 bits, and return no LSE here.
        return evolve(
            CAPABILITIES,
            dtypes=wide,
            graph=GraphSupport.DECODE,
            contiguous=False,
            features=frozenset(),
        )
    if env.capability is not None and env.capability < (8, 9):
        return evolve(CAPABILITIES, dtypes=wide)
    return CAPABILITIES
