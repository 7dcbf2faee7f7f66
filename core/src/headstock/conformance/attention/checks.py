"""The cases of an attention backend, as its claims ask for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from attrs import evolve, field, frozen

from headstock.conformance.attention import shared_prefix_cases
from headstock.conformance.attention.cases import (
    AttentionCase,
    around,
    in_8_bits,
    in_second_group,
    make,
    make_latent,
)
from headstock.conformance.attention.comparison import check
from headstock.conformance.attention.graph_checks import capture, list_graph_cases
from headstock.conformance.attention.state_checks import list_state_cases, row_lens
from headstock.conformance.attention.subject import MakeBackend, Subject, sample_set
from headstock.conformance.case import Case
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

SCALE = 0.3
"""Of scores: no function of a head dimension, so that a scale of the backend's own shows."""
LAYER = LayerInfo(index=0, group=0, scale=SCALE)
PAGE_SIZES = (16, 1, 3, 64, 128, 256)
HEAD_DIMS = (64, 16, 128, 80, 256)
RATIOS = (2, 1, 7, 4, 8)
DTYPES = ("float32", "bfloat16", "float16")
TAIL = 100.0
"""What a row's last page holds past its end: the contract says that it is finite."""
REGION = 1024
"""Tokens of a region: a page that holds the longest row of a case."""
CONTEXTS = (1, 2, 15, 16, 17, 33, 150)
"""Lengths of rows where pages are not what is looked at."""
REGION_CONTEXTS = (7, 90, 600)


@frozen(kw_only=True)
class Shape:
    """The numbers of a case."""

    page_size: int
    head_dim: int
    ratio: int
    dtype: str
    kv_heads: int = 3
    layout: LayoutKind = LayoutKind.FULL
    rope_dim: int = 0
    kv_dtype: str = ""

    def make(
        self, phase: Phase, device: str, lens: list[tuple[int, int]] | None = None
    ) -> AttentionCase:
        """Rows of these lengths, or of `CONTEXTS`."""
        is_latent = self.layout is LayoutKind.LATENT
        kv_heads = 1 if is_latent else self.kv_heads
        case = make(
            phase,
            lens or row_lens(phase, *(REGION_CONTEXTS if self.page_size == REGION else CONTEXTS)),
            page_size=self.page_size,
            heads=kv_heads * self.ratio,
            kv_heads=kv_heads,
            head_dim=self.head_dim,
            dtype=getattr(torch, self.dtype),
            device=device,
            tail=TAIL,
        )
        if is_latent:
            return make_latent(case, self.rope_dim)
        if self.kv_dtype in ("", self.dtype):
            return case
        # A kernel of 8 bits may round queries too; these it leaves as they are.
        narrow = case.q.to(getattr(torch, self.kv_dtype)).to(case.q.dtype)
        return in_8_bits(evolve(case, q=narrow), 1.0, 1.0)


@frozen(kw_only=True)
class CaseOptions:
    """What a case asks of a backend beyond its shape.

    at_page_ends: whether rows end around the ends of pages, some of them long
    """

    layer: LayerInfo = LAYER
    features: frozenset[Feature] = field(factory=frozenset)
    with_lse: bool = False
    contiguous: bool = False
    groups: int = 1
    at_page_ends: bool = False


PLAIN = CaseOptions()


def list_cases(
    spec: AttentionSpec,
    env: DeviceEnv,
    device: str = "",
    make_backend: MakeBackend = make_attention_backend,
    *,
    opt: Sequence[str] = (),
) -> tuple[Case, ...]:
    """All cases of what the spec claims, for this machine.

    device: of tensors; the machine's by default
    make_backend: makes the backend, where kernels are replaced by stand-ins
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
    """The plainest shape of each layout that the spec claims and that is served here."""
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


Named = tuple[str, Callable[[], object]]


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
    for text, work in list_graph_cases(subject, shape.make, LAYER):
        yield f"{head}{text}", work
    if Feature.SHARED_PREFIX in claims.features and Phase.DECODE in claims.phases:
        for number, layout in enumerate(shared_prefix_cases.LAYOUTS):
            yield (
                f"{head}decode: shared prefixes {number + 1}",
                partial(compare_shared, subject, shape, layout),
            )
        # A backend of revision 0 gets no prompts with shared prefixes.
        is_mixed = claims.graph is GraphSupport.ALWAYS and subject.spec.spi.revision > 0
        if is_mixed and Phase.EXTEND in claims.phases:
            yield (
                f"{head}extend: replays beside shared prefixes",
                partial(replay_mixed, subject, shape),
            )


def list_variants(
    subject: Subject, shape: Shape, phase: Phase
) -> Iterator[tuple[str, Shape, CaseOptions]]:
    """A name, a shape and options of each case, one thing of the claims after the other."""
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
        for head_dim in sample_set(claims.head_dims, HEAD_DIMS, 4):
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
    """What each case asks for of the features."""
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
    if Feature.LSE in features:
        yield "LSE", shape, CaseOptions(with_lse=True, features=frozenset({Feature.LSE}))


def compare_case(subject: Subject, shape: Shape, phase: Phase, options: CaseOptions) -> None:
    """Compare what the backend writes with attention in float64."""
    lens = around(phase, shape.page_size) if options.at_page_ends else None
    case = shape.make(phase, subject.device, lens)
    if options.groups == 2:
        case = in_second_group(case)
    layers = [evolve(options.layer, index=0)]
    backend = subject.open(
        case,
        layers,
        features=options.features,
        contiguous=options.contiguous,
        groups=options.groups,
    )
    check(backend, case, layers[0], with_lse=options.with_lse)
    backend.close()


def compare_shared(subject: Subject, shape: Shape, layout: Any) -> None:
    """Compare a step whose rows share pages with attention of each row by itself."""
    case = make_shared(subject, shape, layout)
    backend = subject.open(case, [LAYER], features=frozenset({Feature.SHARED_PREFIX}))
    check(backend, case, LAYER)
    backend.close()


def replay_mixed(subject: Subject, shape: Shape) -> None:
    """One captured plan serves steps with prompts behind rows that share pages, or share none."""
    made = [
        make_shared(subject, shape, layout, prompts=prompts)
        for layout, prompts in shared_prefix_cases.MIXED_LAYOUTS
    ]
    made.sort(key=lambda case: len(case.pool), reverse=True)
    features = frozenset({Feature.SHARED_PREFIX})
    backend = subject.open(made[0], [LAYER], features=features, graph=GraphSupport.ALWAYS)
    shared_prefix_cases.check_mixed_replays(
        backend, LAYER, made, record=partial(capture, subject.device)
    )
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
