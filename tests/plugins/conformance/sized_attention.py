"""Attention backends that are right up to some size, or while nothing else happens."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from attrs import evolve
from plugins.conformance.plain_attention import Plain
from torch import Tensor

from headstock.spi import AttentionContext, AttentionStep, LayerInfo


class LatePoolsShared(Plain):
    """Reads the pool of layer 6 for those behind it."""

    def __init__(self, context: AttentionContext) -> None:
        last = 6
        self.pools = {
            index: context.pools[min(index, last)] if index > last else pool
            for index, pool in context.pools.items()
        }


class PoolsShared(Plain):
    """Has 16 pools, which layers take in turns."""

    def __init__(self, context: AttentionContext) -> None:
        pools = list(context.pools.values())
        self.pools = {index: pools[at % 16] for at, index in enumerate(context.pools)}


class FirstPoolAlone(Plain):
    """Keeps the pool of its first layer."""

    def __init__(self, context: AttentionContext) -> None:
        self.pools = dict.fromkeys(context.pools, next(iter(context.pools.values())))


class FirstLayerKept(Plain):
    """Takes one thing of its first layer for all of them."""

    name = ""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        self.first = next(iter(context.layers.values()))

    def forward(
        self, q: Tensor, layer: LayerInfo, plan: Any, out: Tensor, lse: Tensor | None = None
    ) -> None:
        changed = evolve(layer, **{self.name: getattr(self.first, self.name)})
        super().forward(q, changed, plan, out, lse)


class FirstWindowKept(FirstLayerKept):
    name = "window"


class FirstSoftcapKept(FirstLayerKept):
    name = "softcap"


class FirstGroupKept(FirstLayerKept):
    name = "group"


class KVHeadsCut(Plain):
    """Knows six KV heads."""

    def heads(self, heads: int, kv_heads: int) -> list[int]:
        return [min(head, 5) for head in super().heads(heads, kv_heads)]


class RowsCut(Plain):
    """Computes the first 49 rows of a step."""

    def forward(
        self, q: Tensor, layer: LayerInfo, plan: Any, out: Tensor, lse: Tensor | None = None
    ) -> None:
        super().forward(q, layer, plan, out, lse)
        start = int(plan.host_query_lens[:49].sum())
        out[start:] = 0


class TokensCut(Plain):
    """Sees the latest 1,500 tokens of a row."""

    def first_seen(self, own: Tensor, window: int) -> Tensor:
        return torch.maximum(super().first_seen(own, window), own - 1499)

    def forward(
        self, q: Tensor, layer: LayerInfo, plan: Any, out: Tensor, lse: Tensor | None = None
    ) -> None:
        layer = layer if layer.window else evolve(layer, window=10**6)
        super().forward(q, layer, plan, out, lse)


class QueriesCut(Plain):
    """Writes the first 700 tokens of a step."""

    def forward(
        self, q: Tensor, layer: LayerInfo, plan: Any, out: Tensor, lse: Tensor | None = None
    ) -> None:
        super().forward(q, layer, plan, out, lse)
        out[700:] = out[:1].clone()


class SoftcapOrWindow(Plain):
    """Bounds no scores of layers with a window."""

    def softcap(self, layer: LayerInfo) -> float:
        return 0.0 if layer.window else layer.softcap


class WindowOrLSE(Plain):
    """Gives the LSE of all tokens, whatever the window."""

    def forward(
        self, q: Tensor, layer: LayerInfo, plan: Any, out: Tensor, lse: Tensor | None = None
    ) -> None:
        super().forward(q, layer, plan, out)
        if lse is not None:
            whole = evolve(layer, window=None)
            super().forward(q, whole, plan, torch.empty_like(out), lse)


class ScaleOrSoftcap(Plain):
    """Has a scale of its own where scores are bounded and heads are many."""

    def scale(self, layer: LayerInfo, q: Tensor) -> float:
        is_other = layer.softcap and q.shape[1] > 3
        return float(q.shape[-1] ** -0.5) if is_other else layer.scale


class MaximumForgotten(Plain):
    """Takes exponentials as they are."""

    shift = 0.0

    def forward(
        self, q: Tensor, layer: LayerInfo, plan: Any, out: Tensor, lse: Tensor | None = None
    ) -> None:
        super().forward(q, layer, plan, out, lse)
        pool, start = self.pools[layer.index], 0
        lens = zip(plan.host_query_lens.tolist(), plan.host_context_lens.tolist(), strict=True)
        for row, (queries, context) in enumerate(lens):
            places = torch.arange(context)
            pages = plan.page_tables[layer.group][row, places // pool.shape[2]].long()
            keys = pool[pages, 0, places % pool.shape[2]]
            pairs = self.heads(q.shape[1], pool.shape[3])
            scores = torch.einsum("qhd,khd->qhk", q[start : start + queries], keys[:, pairs])
            highest = (scores * layer.scale).nan_to_num().amax(-1).exp()
            # infinity over infinity, or 0 over 0
            out[start : start + queries] *= (highest / highest).unsqueeze(-1)
            start += queries


class CallsCounted(Plain):
    """Is off by a little more from the 700th step on."""

    calls = 0

    def plan(self, step: AttentionStep) -> Any:
        self.calls += 1
        return step

    def forward(
        self, q: Tensor, layer: LayerInfo, plan: Any, out: Tensor, lse: Tensor | None = None
    ) -> None:
        super().forward(q, layer, plan, out, lse)
        if self.calls > 700:
            out += 0.01


class PlansKept(Plain):
    """Keeps every output that it wrote."""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        self.kept: list[Tensor] = []

    def forward(
        self, q: Tensor, layer: LayerInfo, plan: Any, out: Tensor, lse: Tensor | None = None
    ) -> None:
        super().forward(q, layer, plan, out, lse)
        self.kept.append(out)


WORKSPACE: dict[str, Tensor] = {}


class CloseClears(Plain):
    """Lets go of a workspace that all backends of a process share."""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        WORKSPACE["ones"] = torch.ones(1)

    def forward(
        self, q: Tensor, layer: LayerInfo, plan: Any, out: Tensor, lse: Tensor | None = None
    ) -> None:
        super().forward(q, layer, plan, out, lse)
        out *= WORKSPACE["ones"]

    def close(self) -> None:
        WORKSPACE.clear()


class CloseResets(Plain):
    """Counts backends, and is off once one of them closed."""

    closed: ClassVar[list[int]] = [0]

    def forward(
        self, q: Tensor, layer: LayerInfo, plan: Any, out: Tensor, lse: Tensor | None = None
    ) -> None:
        super().forward(q, layer, plan, out, lse)
        out *= math.exp(-self.closed[0])

    def close(self) -> None:
        self.closed[0] += 1


SIZED: dict[type[Plain], tuple[str, str]] = {
    LatePoolsShared: ("many layers of their own pools", "it reads the pool of layer 6"),
    PoolsShared: ("many layers", "it reads the pool of layer"),
    FirstWindowKept: (
        "layers that differ",
        "layer 2 of 8 that differ (group 1, scale 0.3, window 9",
    ),
    FirstSoftcapKept: ("layers that differ", "window None, softcap 0.7"),
    FirstGroupKept: ("layers that differ", "layer 2 of 8 that differ (group 1"),
    KVHeadsCut: ("every two claims together", "kv_heads 8"),
    FirstPoolAlone: ("many layers of their own pools", "it reads the pool of layer 0"),
    RowsCut: ("many rows", "first at token"),
    TokensCut: ("long rows", "first at token"),
    QueriesCut: ("long rows", "first at token 700"),
    SoftcapOrWindow: ("every two claims together", "softcap 0.7"),
    WindowOrLSE: ("every two claims together", "the LSE is wrong"),
    ScaleOrSoftcap: ("every two claims together", "off by up to"),
    MaximumForgotten: ("large scores", "subtract the maximum"),
    CallsCounted: ("1030 calls", "call 701: off by up to 0.01"),
    PlansKept: ("1030 calls", "the backend keeps what it should free"),
    CloseClears: ("an engine ends", "a backend is wrong after another one was closed"),
    CloseResets: ("an engine ends", "a backend is wrong after another one was closed"),
}
"""A wrong backend -> a part of the name of the case that shows it, and what the case says."""
