"""The entry point of `fa`."""

from __future__ import annotations

from collections.abc import Sequence

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
    SpiRange,
)
from headstock_fa.providers import (
    ALL_FEATURES,
    FA3_HINT,
    PROVIDERS,
    REQUIRE,
    Provider,
    choose_provider,
    installed_versions,
    major_minor,
)


def spec() -> AttentionSpec:
    """The spec of `fa`: the capabilities of all providers; `resolve` narrows them to the installed
    one."""
    return AttentionSpec(
        name="fa",
        spi=SpiRange(0, 3),
        summary=f"FlashAttention, for CUDA; found here: {describe_installed()}",
        implementation="headstock_fa.make:make_backend",
        requires=(REQUIRE,),
        options="headstock_fa.options:FlashOptions",
        resolve="headstock_fa.plugin:resolve",
        capabilities=CAPABILITIES,
    )


EIGHT_BIT_KV = ("bfloat16", "float8_e4m3fn", "bfloat16")
"""FlashAttention-3 only; it then computes with 8-bit queries and probabilities."""

LATENT_WIDTHS = (512, 64)
"""The latent vectors that FlashAttention-3 reads: widths of the part for keys and values, and of
the position part.
"""

CAPABILITIES = AttentionCapabilities(
    phases=frozenset(Phase),
    devices=(DeviceRange("cuda", (8, 0)),),
    dtypes=frozenset({(dtype,) * 3 for dtype in ("bfloat16", "float16")} | {EIGHT_BIT_KV}),
    layouts=frozenset({LayoutKind.FULL, LayoutKind.LATENT}),
    head_dims=IntSet.multiples(8, 256),
    gqa_ratios=IntSet.all(),
    page_sizes=IntSet.all(),
    mixed_groups=False,
    paged=True,
    contiguous=True,
    graph=GraphSupport.ALWAYS,
    planning=Planning.NONE,
    features=ALL_FEATURES,
)


def describe_installed() -> str:
    """The installed providers; the first one that serves the device is used."""
    versions = installed_versions()
    descriptions = [
        f"{provider.require.distribution} {number} (FA{provider.generation})"
        for provider in PROVIDERS
        if (number := versions.get(provider.require.distribution))
        and major_minor(number) >= provider.least
    ]
    return ", ".join(descriptions) or "none"


def resolve(query: AttentionQuery, env: DeviceEnv) -> AttentionCapabilities | tuple[Rejection, ...]:
    """The capabilities of the first provider that serves here, or why it cannot serve `query`."""
    provider, rejections = choose_provider(env)
    if provider is None:
        return (
            Rejection(
                code="provider",
                message=f"no FlashAttention serves here: {'; '.join(rejections)}",
                hint=REQUIRE.hint,
            ),
        )
    capabilities = narrow_capabilities(provider, query)
    label = f"{provider.require.distribution} (FlashAttention-{provider.generation})"
    latent = [group.layout for group in query.groups if isinstance(group.layout, LatentKV)]
    if latent:
        return _resolve_latent(provider, label, latent)
    reasons = []
    if (
        not query.contiguous
        and query.page_size is not None
        and query.page_size not in capabilities.page_sizes
    ):
        reasons.append(
            Rejection(
                code="page_size",
                message=f"{label} reads pages of {capabilities.page_sizes}, not {query.page_size}",
                hint=f"Set page_size (--page-size) to {provider.page_step}, or on Hopper install "
                f"a FlashAttention-3: {FA3_HINT}.",
            )
        )
    if any(Feature.SOFTCAP in group.features - capabilities.features for group in query.groups):
        reasons.append(
            Rejection(
                code="feature",
                message=f"{label} has no soft-cap",
                hint=f"Install flash-attn, or on Hopper {FA3_HINT}; or name another backend by "
                "attn (--attn).",
            )
        )
    return tuple(reasons) or capabilities


def _resolve_latent(
    provider: Provider, label: str, layouts: Sequence[LatentKV]
) -> AttentionCapabilities | tuple[Rejection, ...]:
    """The capabilities of `fa` for latent vectors, or why it cannot read them."""
    others = [
        widths
        for layout in layouts
        if (widths := (layout.out_dim, layout.rope_dim)) != LATENT_WIDTHS
    ]
    if provider.generation != 3 or others:
        found, wanted = (
            f"{rank} with {rope_dim} for the position"
            for rank, rope_dim in ((*others, LATENT_WIDTHS)[0], LATENT_WIDTHS)
        )
        return (
            Rejection(
                code="layout",
                message=f"{label} cannot read latent vectors of {found}; FlashAttention-3 reads "
                f"{wanted}",
                hint="Set attn (--attn) to fi or sdpa.",
            ),
        )
    return evolve(
        CAPABILITIES,
        layouts=frozenset({LayoutKind.LATENT}),
        # Its kernels for them were not tested with regions, and return no LSE here.
        dtypes=CAPABILITIES.dtypes - {EIGHT_BIT_KV},
        contiguous=False,
        graph=provider.graph,
        features=frozenset(),
    )


def narrow_capabilities(provider: Provider, query: AttentionQuery) -> AttentionCapabilities:
    """The capabilities of `fa` with this provider and types: 8-bit keys are read 16 at a time."""
    return evolve(
        CAPABILITIES,
        head_dims=IntSet.multiples(16, 256)
        if any(group.kv_dtype == EIGHT_BIT_KV[1] for group in query.groups)
        else CAPABILITIES.head_dims,
        dtypes=CAPABILITIES.dtypes
        if provider.generation == 3
        else CAPABILITIES.dtypes - {EIGHT_BIT_KV},
        page_sizes=IntSet.multiples(provider.page_step),
        # A contiguous region is one page as long as the longest sequence (decision 0008), of any
        # multiple.
        contiguous=provider.page_step == 1,
        graph=provider.graph,
        features=provider.features,
    )
