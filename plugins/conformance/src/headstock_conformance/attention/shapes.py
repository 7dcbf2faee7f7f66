"""The shapes of an attention backend's cases, and the options of a case."""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import evolve, field, frozen

from headstock.spi import Feature, LayerInfo, LayoutKind, Phase
from headstock_conformance.attention.cases import (
    AttentionCase,
    add_sinks,
    around,
    in_8_bits,
    in_second_group,
    make,
    make_latent,
)
from headstock_conformance.attention.comparison import check
from headstock_conformance.attention.state_checks import row_lens
from headstock_conformance.attention.subject import Subject

Named = tuple[str, Callable[[], object]]
SCALE = 0.3
"""Scale of scores: not derived from a head dimension, to detect a backend with its own scale."""
LAYER = LayerInfo(index=0, group=0, scale=SCALE)
PAGE_SIZES = (16, 1, 3, 64, 128, 256)
HEAD_DIMS = (64, 16, 128, 80, 256)
WIDE_HEAD_DIMS = (512, 256)
"""Head sizes for which kernels have tiles of their own: the first one that is claimed is tried."""
RATIOS = (2, 1, 7, 4, 8)
DTYPES = ("float32", "bfloat16", "float16")
TAIL = 100.0
"""The contents of a row's last page past its end, finite by the contract."""
REGION = 1024
"""Tokens of a region: a page that holds the longest row of a case."""
CONTEXTS = (1, 2, 15, 16, 17, 33, 150)
"""Lengths of rows in cases that do not test pages."""
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

    @property
    def heads(self) -> int:
        """Of the queries."""
        return self.ratio * (1 if self.layout is LayoutKind.LATENT else self.kv_heads)

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
            heads=self.heads,
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
        # An 8-bit kernel may round queries too; these are exact in 8 bits.
        narrow = case.q.to(getattr(torch, self.kv_dtype)).to(case.q.dtype)
        return in_8_bits(evolve(case, q=narrow), 1.0, 1.0)


@frozen(kw_only=True)
class CaseOptions:
    """The options of a case besides its shape.

    at_page_ends: whether rows end around the ends of pages, some of them long
    """

    layer: LayerInfo = LAYER
    with_sinks: bool = False
    features: frozenset[Feature] = field(factory=frozenset)
    with_lse: bool = False
    contiguous: bool = False
    groups: int = 1
    at_page_ends: bool = False


PLAIN = CaseOptions()


def compare_case(subject: Subject, shape: Shape, phase: Phase, options: CaseOptions) -> None:
    """Compare what the backend writes with attention in float64."""
    lens = around(phase, shape.page_size) if options.at_page_ends else None
    case = shape.make(phase, subject.device, lens)
    if options.groups == 2:
        case = in_second_group(case)
    layer = (
        add_sinks(options.layer, shape.heads, subject.device)
        if options.with_sinks
        else options.layer
    )
    layers = [evolve(layer, index=0)]
    backend = subject.open(
        case,
        layers,
        features=options.features,
        contiguous=options.contiguous,
        groups=options.groups,
    )
    check(backend, case, layers[0], with_lse=options.with_lse)
    backend.close()
