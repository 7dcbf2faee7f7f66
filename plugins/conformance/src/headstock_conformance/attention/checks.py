"""The cases of an attention backend, by its claims."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from attrs import evolve

from headstock.spi import (
    AttentionSpec,
    DeviceEnv,
    Feature,
    GraphSupport,
    LayerInfo,
    LayoutKind,
    Phase,
)
from headstock.startup.assemble import make_attention_backend
from headstock_conformance.attention import shared_prefix_cases
from headstock_conformance.attention.cases import (
    AttentionCase,
    add_sinks,
    make_latent,
)
from headstock_conformance.attention.comparison import check
from headstock_conformance.attention.graph_checks import capture, list_graph_cases
from headstock_conformance.attention.pairs import list_pairs
from headstock_conformance.attention.shapes import (
    DTYPES,
    HEAD_DIMS,
    LAYER,
    PAGE_SIZES,
    PLAIN,
    RATIOS,
    REGION,
    WIDE_HEAD_DIMS,
    CaseOptions,
    Named,
    Shape,
    compare_case,
)
from headstock_conformance.attention.size_checks import list_size_cases
from headstock_conformance.attention.state_checks import list_state_cases, row_lens
from headstock_conformance.attention.subject import MakeBackend, Subject, sample_set
from headstock_conformance.case import Case


def list_cases(
    spec: AttentionSpec,
    env: DeviceEnv,
    device: str = "",
    make_backend: MakeBackend = make_attention_backend,
    *,
    opt: Sequence[str] = (),
) -> tuple[Case, ...]:
    """All cases for the claims of the spec, on this machine.

    device: of tensors; by default the machine's
    make_backend: makes the backend, if kernels are replaced by stand-ins
    """
    subject = Subject(spec=spec, env=env, device=device or env.device, make=make_backend, opt=opt)
    shapes = list_shapes(subject)
    return tuple(
        Case(name, run)
        for kind in LayoutKind
        if kind in shapes
        for name, run in list_of_layout(subject, shapes[kind])
    )


def list_shapes(subject: Subject) -> dict[LayoutKind, Shape]:
    """The simplest shape of each layout that the spec claims and that is supported here."""
    claims = subject.claims
    types = [q for q, kv, out in claims.dtypes if q == kv == out]
    dtype = next((name for name in DTYPES if name in types), min(types, default="bfloat16"))
    sizes = sample_set(claims.page_sizes, PAGE_SIZES, len(PAGE_SIZES)) if claims.paged else [REGION]
    full = Shape(
        page_size=sizes[0],
        head_dim=sample_set(claims.head_dims, HEAD_DIMS, 1)[0],
        ratio=sample_set(claims.gqa_ratios, RATIOS, 1)[0],
        dtype=dtype,
    )
    latent = evolve(full, layout=LayoutKind.LATENT, ratio=16)
    tried = {
        LayoutKind.FULL: [evolve(full, page_size=size) for size in sizes],
        LayoutKind.LATENT: [
            evolve(latent, page_size=size, head_dim=dim, rope_dim=rope_dim)
            for dim, rope_dim in ((72, 8), (576, 64))
            for size in sizes
        ],
    }
    return {
        kind: next((shape for shape in shapes if is_served(subject, shape)), shapes[0])
        for kind, shapes in tried.items()
        if kind in claims.layouts
    }


def is_served(subject: Subject, shape: Shape) -> bool:
    """Whether the plugin accepts the shape here."""
    phase = min(subject.claims.phases, key=lambda phase: phase.value)
    case = shape.make(phase, subject.device, row_lens(phase, 2))
    return subject.serves(case, contiguous=not subject.claims.paged)


def list_of_layout(subject: Subject, shape: Shape) -> Iterator[Named]:
    """The cases of one layout."""
    claims = subject.claims
    head = "" if shape.layout is LayoutKind.FULL else f"{shape.layout.value} KV, "
    contiguous = not claims.paged
    for phase in sorted(claims.phases, key=lambda phase: phase.value):
        for text, changed, options in list_variants(subject, shape, phase):
            options = evolve(options, contiguous=options.contiguous or contiguous)
            yield (
                f"{head}{phase.value}: {text}",
                partial(compare_case, subject, changed, phase, options),
            )
    for text, work in list_state_cases(subject, shape.make, LAYER, contiguous=contiguous):
        yield f"{head}{text}", work
    yield from list_pairs(subject, shape, head)
    # Backends depend on numbers of tokens: few heads make these cases cheap.
    few = evolve(shape, kv_heads=1)
    fewest = evolve(few, ratio=2)
    if shape.layout is LayoutKind.LATENT and is_served(subject, fewest):
        few = fewest
    for text, work in list_size_cases(subject, few.make, LAYER, contiguous=contiguous):
        yield f"{head}{text}", work
    layers = list(list_layers(claims.features, shape.heads, subject.device))
    for suffix, layer in (("", LAYER), *layers):
        for text, work in list_graph_cases(subject, shape.make, layer):
            yield f"{head}{text}{suffix}", work
    if Feature.SHARED_PREFIX in claims.features and Phase.DECODE in claims.phases:
        layouts = shared_prefix_cases.LAYOUTS
        for number, layout in enumerate(layouts):
            yield (
                f"{head}decode: shared prefixes {number + 1}",
                partial(compare_shared, subject, shape, layout, LAYER),
            )
        for suffix, layer in layers:
            yield (
                f"{head}decode: shared prefixes{suffix}",
                partial(compare_shared, subject, shape, layouts[1], layer),
            )
        is_mixed = claims.graph is GraphSupport.ALWAYS
        if is_mixed and Phase.EXTEND in claims.phases:
            yield (
                f"{head}extend: replays beside shared prefixes",
                partial(replay_mixed, subject, shape),
            )


def list_layers(
    features: frozenset[Feature], heads: int, device: str
) -> Iterator[tuple[str, LayerInfo]]:
    """Layers that ask for the features, each alone, and window and softcap together."""
    values: dict[Feature, dict[str, Any]] = {
        Feature.SLIDING_WINDOW: {"window": 40},
        Feature.SOFTCAP: {"softcap": 0.7},
    }
    changes = [value for feature, value in values.items() if feature in features]
    for change in changes:
        yield f", {next(iter(change))}", evolve(LAYER, **change)
    if len(changes) == len(values):
        yield ", window and softcap", evolve(LAYER, window=40, softcap=0.7)
    if Feature.SINKS in features:
        yield ", sinks", add_sinks(LAYER, heads, device)


def list_variants(
    subject: Subject, shape: Shape, phase: Phase
) -> Iterator[tuple[str, Shape, CaseOptions]]:
    """Name, shape and options of each case, one claim after another."""
    claims = subject.claims
    if claims.paged:
        for page_size in sample_set(claims.page_sizes, PAGE_SIZES, 4):
            yield (
                f"pages of {page_size}",
                evolve(shape, page_size=page_size),
                CaseOptions(at_page_ends=True),
            )
    if claims.contiguous:
        yield "regions", evolve(shape, page_size=REGION), evolve(PLAIN, contiguous=True)
    for q, kv, out in sorted(claims.dtypes):
        if q == out and (q == kv or shape.layout is LayoutKind.FULL):
            text = f"{q}" if q == kv else f"{q} with {kv} KV"
            yield text, evolve(shape, dtype=q, kv_dtype=kv), PLAIN
    if shape.layout is LayoutKind.FULL:
        usual = sample_set(claims.head_dims, HEAD_DIMS, 4)
        wide = [head_dim for head_dim in WIDE_HEAD_DIMS if head_dim in claims.head_dims]
        for head_dim in dict.fromkeys((*usual, *wide[:1])):
            yield f"head_dim {head_dim}", evolve(shape, head_dim=head_dim), PLAIN
        for ratio in sample_set(claims.gqa_ratios, RATIOS, 4):
            text = f"{ratio} query heads a KV head"
            yield text, evolve(shape, ratio=ratio), PLAIN
    else:
        for dim, rope_dim, heads in ((576, 64, 16), (22, 6, 3)):
            changed = evolve(shape, head_dim=dim, rope_dim=rope_dim, ratio=heads)
            yield f"vectors of {dim}, {rope_dim} turned", changed, PLAIN
    yield (
        "a layer in the second KV group",
        shape,
        CaseOptions(layer=evolve(LAYER, group=1), groups=2),
    )
    yield from list_features(subject, shape)


def list_features(subject: Subject, shape: Shape) -> Iterator[tuple[str, Shape, CaseOptions]]:
    """The features that each case uses."""
    features = subject.claims.features
    if Feature.SLIDING_WINDOW in features:
        for window in (1, 9, shape.page_size + 1, 300):
            options = CaseOptions(
                layer=evolve(LAYER, window=window), features=frozenset({Feature.SLIDING_WINDOW})
            )
            yield f"a window of {window}", shape, options
    if Feature.SOFTCAP in features:
        options = CaseOptions(
            layer=evolve(LAYER, softcap=0.7), features=frozenset({Feature.SOFTCAP})
        )
        yield "softcap", shape, options
    if Feature.SINKS in features:
        yield "sinks", shape, CaseOptions(with_sinks=True)
    if Feature.LSE in features:
        yield "LSE", shape, CaseOptions(with_lse=True, features=frozenset({Feature.LSE}))


def compare_shared(subject: Subject, shape: Shape, layout: Any, layer: LayerInfo) -> None:
    """Compare a step whose rows share pages with separate attention of each row."""
    case = make_shared(subject, shape, layout)
    backend = subject.open(case, [layer], features=frozenset({Feature.SHARED_PREFIX}))
    check(backend, case, layer)
    backend.close()


def replay_mixed(subject: Subject, shape: Shape) -> None:
    """One captured plan serves steps with prompts after rows that share pages, or share none."""
    made = [
        make_shared(subject, shape, layout, prompts=prompts)
        for layout, prompts in shared_prefix_cases.MIXED_LAYOUTS
    ]
    made.sort(key=lambda case: len(case.pool), reverse=True)
    features = frozenset({Feature.SHARED_PREFIX})
    backend = subject.open(made[0], [LAYER], features=features, graph=GraphSupport.ALWAYS)
    shared_prefix_cases.check_mixed_replays(backend, LAYER, made, record=partial(capture, subject))
    backend.close()


def make_shared(subject: Subject, shape: Shape, layout: Any, **more: Any) -> AttentionCase:
    """A step whose decode rows share pages."""
    is_latent = shape.layout is LayoutKind.LATENT
    kv_heads = 1 if is_latent else shape.kv_heads
    case = shared_prefix_cases.make(
        *layout,
        page_size=shape.page_size,
        heads=kv_heads * shape.ratio,
        kv_heads=kv_heads,
        head_dim=shape.head_dim,
        dtype=getattr(torch, shape.dtype),
        device=subject.device,
        **more,
    )
    return make_latent(case, shape.rope_dim) if is_latent else case
