"""An attention backend in a few lines, and what a stranger may get wrong in one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from headstock.spi import (
    AttentionBackend,
    AttentionCapabilities,
    AttentionContext,
    AttentionSpec,
    AttentionStep,
    DeviceRange,
    Feature,
    GraphSupport,
    IntSet,
    LayerInfo,
    LayoutKind,
    Phase,
    Planning,
    SpiRange,
)


def make_spec(name: str) -> AttentionSpec:
    """Few claims, so that a check takes no second."""
    return AttentionSpec(
        name=name,
        spi=SpiRange(0, 3),
        summary="one row after another",
        implementation="nowhere:nothing",
        capabilities=AttentionCapabilities(
            phases=frozenset(Phase),
            devices=(DeviceRange("cpu"),),
            dtypes=frozenset({("float32", "float32", "float32")}),
            layouts=frozenset({LayoutKind.FULL}),
            head_dims=IntSet.of(8),
            gqa_ratios=IntSet.of(1, 2),
            page_sizes=IntSet.of(4),
            mixed_groups=False,
            paged=True,
            contiguous=True,
            graph=GraphSupport.NEVER,
            planning=Planning.NONE,
            features=frozenset(
                {Feature.SLIDING_WINDOW, Feature.SOFTCAP, Feature.LSE, Feature.SINKS}
            ),
        ),
    )


class Plain(AttentionBackend):
    """Each row by itself, in float64."""

    def __init__(self, context: AttentionContext) -> None:
        self.pools = context.pools

    def plan(self, step: AttentionStep) -> Any:
        return step

    def table(self, plan: AttentionStep, layer: LayerInfo) -> Tensor:
        return plan.page_tables[layer.group]

    def slots(self, places: Tensor, size: int) -> Tensor:
        return places % size

    def columns(self, places: Tensor, size: int) -> Tensor:
        return places // size

    def heads(self, heads: int, kv_heads: int) -> list[int]:
        return [head * kv_heads // heads for head in range(heads)]

    def scale(self, layer: LayerInfo, q: Tensor) -> float:
        return layer.scale

    def last_seen(self, own: Tensor) -> Tensor:
        return own

    def first_seen(self, own: Tensor, window: int) -> Tensor:
        return own - window + 1

    def softcap(self, layer: LayerInfo) -> float:
        return layer.softcap

    def sinks(self, layer: LayerInfo) -> Tensor | None:
        return layer.sinks

    def forward(
        self, q: Tensor, layer: LayerInfo, plan: Any, out: Tensor, lse: Tensor | None = None
    ) -> None:
        pool, start = self.pools[layer.index], 0
        size, table = pool.shape[2], self.table(plan, layer)
        pairs = self.heads(q.shape[1], pool.shape[3])
        lens = zip(plan.host_query_lens.tolist(), plan.host_context_lens.tolist(), strict=True)
        for row, (queries, context) in enumerate(lens):
            places = torch.arange(context)
            pages = table[row, self.columns(places, size)].long()
            cells = pool[pages, :, self.slots(places, size)].double()
            keys, values = cells[:, 0][:, pairs], cells[:, 1][:, pairs]
            stop = start + queries
            scores = torch.einsum("qhd,khd->hqk", q[start:stop].double(), keys)
            scores *= self.scale(layer, q)
            if self.softcap(layer):
                scores = layer.softcap * torch.tanh(scores / layer.softcap)
            own = torch.arange(context - queries, context)[:, None]
            seen = places <= self.last_seen(own)
            if layer.window is not None:
                seen = seen & (places >= self.first_seen(own, layer.window))
            # A place that is not seen may hold NaN behind the window: its weight of 0 is no guard.
            values = torch.where(seen.any(0)[:, None, None], values, 0.0)
            scores = scores.masked_fill(~seen, -math.inf)
            weights, sinks = scores.softmax(-1), self.sinks(layer)
            if sinks is not None:
                sums = scores.logsumexp(-1)
                weights *= torch.exp(sums - torch.logaddexp(sums, sinks.double()[:, None]))[
                    ..., None
                ]
            out[start:stop] = torch.einsum("hqk,khd->qhd", weights, values).to(out)
            if lse is not None:
                lse[start:stop] = scores.logsumexp(-1).t().to(lse)
            start = stop

    def close(self) -> None:
        self.pools = {}


class PageLate(Plain):
    """Reads each page one column late in the page table."""

    def columns(self, places: Tensor, size: int) -> Tensor:
        return places // size + 1


class SlotLate(Plain):
    """Reads each page one slot late."""

    def slots(self, places: Tensor, size: int) -> Tensor:
        return (places + 1) % size


class HeadsSwapped(Plain):
    """Takes the KV heads in turns."""

    def heads(self, heads: int, kv_heads: int) -> list[int]:
        return [head % kv_heads for head in range(heads)]


class FutureSeen(Plain):
    """Sees the token behind its own."""

    def last_seen(self, own: Tensor) -> Tensor:
        return own + 1


class NothingMasked(Plain):
    """Has no causal mask."""

    def last_seen(self, own: Tensor) -> Tensor:
        return torch.full_like(own, 10**6)


class OwnTokenForgotten(Plain):
    """Sees the tokens before its own alone."""

    def last_seen(self, own: Tensor) -> Tensor:
        return (own - 1).clamp(min=0)


class OwnScale(Plain):
    """Scales by the head dimension and not as the layer says."""

    def scale(self, layer: LayerInfo, q: Tensor) -> float:
        return float(q.shape[-1] ** -0.5)


class ScaleTwice(Plain):
    """Scales queries, and scores too."""

    def scale(self, layer: LayerInfo, q: Tensor) -> float:
        return layer.scale**2


class TablesZeroed(Plain):
    """Keeps a page table of its own and never fills it."""

    def table(self, plan: AttentionStep, layer: LayerInfo) -> Tensor:
        return torch.zeros_like(plan.page_tables[layer.group])


class FirstTableAlone(Plain):
    """Reads the page table of the first KV group for every layer."""

    def table(self, plan: AttentionStep, layer: LayerInfo) -> Tensor:
        return plan.page_tables[0]


class TableWritten(Plain):
    """Uses the page table as a buffer."""

    def plan(self, step: AttentionStep) -> Any:
        step.page_tables[0].add_(1).sub_(1)[:, -1] = 3
        return step


class QueriesWritten(Plain):
    """Scales the queries in place."""

    def scale(self, layer: LayerInfo, q: Tensor) -> float:
        q.mul_(2)
        return layer.scale / 2


class PoolWritten(Plain):
    """Cleans the dummy page."""

    def plan(self, step: AttentionStep) -> Any:
        self.pools[0][0] = 0
        return step


class PlanShared(Plain):
    """Keeps the step in itself: all plans are the latest."""

    step: AttentionStep

    def plan(self, step: AttentionStep) -> Any:
        self.step = step
        return self

    def forward(
        self, q: Tensor, layer: LayerInfo, plan: Any, out: Tensor, lse: Tensor | None = None
    ) -> None:
        super().forward(q, layer, self.step, out, lse)


LATEST: dict[str, Any] = {}


class EnginesShare(Plain):
    """Keeps its pools where all engines of the process see them."""

    def __init__(self, context: AttentionContext) -> None:
        LATEST["pools"] = context.pools

    @property
    def pools(self) -> Any:
        return LATEST["pools"]

    def close(self) -> None:
        pass


class WindowIgnored(Plain):
    """Claims windows and sees everything."""

    def first_seen(self, own: Tensor, window: int) -> Tensor:
        return torch.zeros_like(own)


class WindowLong(Plain):
    """Sees one token more than the window has."""

    def first_seen(self, own: Tensor, window: int) -> Tensor:
        return own - window


class SoftcapIgnored(Plain):
    """Claims softcap and bounds nothing."""

    def softcap(self, layer: LayerInfo) -> float:
        return 0.0


class SinksIgnored(Plain):
    """Claims sinks and has none."""

    def sinks(self, layer: LayerInfo) -> Tensor | None:
        return None


class SinkOfFirstHead(Plain):
    """Takes one sink for all heads."""

    def sinks(self, layer: LayerInfo) -> Tensor | None:
        return None if layer.sinks is None else layer.sinks[:1]


class LayerScaleKept(Plain):
    """Takes the scale of the first layer for all."""

    kept = 0.0

    def scale(self, layer: LayerInfo, q: Tensor) -> float:
        self.kept = self.kept or layer.scale
        return self.kept


class NothingWritten(Plain):
    """Makes a new output in place of writing to the one given."""

    def forward(
        self, q: Tensor, layer: LayerInfo, plan: Any, out: Tensor, lse: Tensor | None = None
    ) -> None:
        super().forward(q, layer, plan, torch.empty_like(out), lse)


class Raises(Plain):
    """Fails at a prompt."""

    def plan(self, step: AttentionStep) -> Any:
        if step.phase is Phase.PREFILL:
            raise KeyError("prefill")
        return step


class Inexact(Plain):
    """Is off by a little more than rounding explains."""

    def forward(
        self, q: Tensor, layer: LayerInfo, plan: Any, out: Tensor, lse: Tensor | None = None
    ) -> None:
        super().forward(q, layer, plan, out, lse)
        out += 3e-5


BROKEN: dict[type[Plain], str] = {
    PageLate: "the page table is read one column late",
    SlotLate: "pages are read one slot late",
    HeadsSwapped: "query heads read the KV heads in turns, not in groups",
    FutureSeen: "queries see a later token",
    NothingMasked: "queries see all tokens of their row, later ones too",
    OwnTokenForgotten: "queries do not see their own token",
    OwnScale: "the layer's scale is not used, but one of the head dimension",
    ScaleTwice: "the scale is applied twice",
    TablesZeroed: "every page is the dummy page, as if the page table held zeros",
    FirstTableAlone: "every page is the dummy page",
    TableWritten: "it writes to step.page_tables[0], which it may only read",
    QueriesWritten: "it writes to the queries, which it may only read",
    PoolWritten: "it writes to the pool, which it may only read",
    PlanShared: "the plan of a step changes when the next step is planned",
    EnginesShare: "two backends of a process disturb each other",
    WindowIgnored: "the window is ignored",
    WindowLong: "the window is one token too long",
    SoftcapIgnored: "the softcap is ignored",
    SinksIgnored: "the sinks are ignored",
    SinkOfFirstHead: "all heads have the first head's sink",
    LayerScaleKept: "a layer by a plan that an earlier layer used is wrong",
    NothingWritten: "some of the output is never written",
    Inexact: "inexact: off by up to 3",
    Raises: "KeyError: 'prefill' in Raises.plan",
}
"""A wrong backend -> what the check says of it."""
