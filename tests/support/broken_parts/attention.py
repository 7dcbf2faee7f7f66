"""Attention backends that are each wrong in one way."""

from __future__ import annotations

import sys
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from headstock.debug.attention_reference import attend_row, gather_context
from headstock.spi import AttentionBackend, AttentionContext, AttentionStep, LayerInfo, Phase


class Sound(AttentionBackend):
    """Attention written out, row by row; subclasses change one thing."""

    def __init__(self, context: AttentionContext) -> None:
        self.kv = context.kv

    def plan(self, step: AttentionStep) -> Any:
        return evolve(step)

    def forward(
        self, q: Tensor, layer: LayerInfo, plan: Any, out: Tensor, lse: Tensor | None = None
    ) -> None:
        stop = 0
        for row, count in enumerate(plan.host_query_lens.tolist()):
            start, stop = stop, stop + count
            keys, values = gather_context(plan, layer, self.kv[layer.index], row)
            out[start:stop] = self.attend(q[start:stop], keys, values, layer)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, layer: LayerInfo) -> Tensor:
        return attend_row(q, keys, values, layer)

    def close(self) -> None:
        pass


class CannotBeMade(Sound):
    def __init__(self, context: AttentionContext) -> None:
        self.size = context.page_size // "two"  # type: ignore[operator]


def resolve_raises(query: Any, env: Any) -> Any:
    raise LookupError("no such kernel")


class Raises(Sound):
    def forward(self, q: Tensor, *more: Any) -> None:
        raise RuntimeError("unsupported stride")


class Exits(Sound):
    def forward(self, q: Tensor, *more: Any) -> None:
        sys.exit("no license for this kernel")


class NamesOutput(Sound):
    def forward(
        self, q: Tensor, layer: LayerInfo, plan: Any, out: Tensor, lse: Tensor | None = None
    ) -> None:
        out = torch.empty_like(out)
        super().forward(q, layer, plan, out)


class PageOff(Sound):
    def plan(self, step: AttentionStep) -> Any:
        return evolve(step, page_tables=tuple(table.roll(1, 1) for table in step.page_tables))


class SlotOff(Sound):
    def attend(self, q: Tensor, keys: Tensor, values: Tensor, layer: LayerInfo) -> Tensor:
        return attend_row(q, keys.roll(1, 0), values.roll(1, 0), layer)


class HeadsSwapped(Sound):
    def attend(self, q: Tensor, keys: Tensor, values: Tensor, layer: LayerInfo) -> Tensor:
        return attend_row(q, keys.flip(1), values.flip(1), layer)


class SeesFuture(Sound):
    def attend(self, q: Tensor, keys: Tensor, values: Tensor, layer: LayerInfo) -> Tensor:
        return torch.cat([attend_row(each[None], keys, values, layer) for each in q])


class ForgetsOwnToken(Sound):
    def attend(self, q: Tensor, keys: Tensor, values: Tensor, layer: LayerInfo) -> Tensor:
        if len(keys) == len(q):
            return attend_row(q, keys, values, layer)
        return attend_row(q, keys[:-1], values[:-1], layer)


class WrongScale(Sound):
    def attend(self, q: Tensor, keys: Tensor, values: Tensor, layer: LayerInfo) -> Tensor:
        return attend_row(q, keys, values, evolve(layer, scale=layer.scale * 3))


class WrongWindow(Sound):
    def attend(self, q: Tensor, keys: Tensor, values: Tensor, layer: LayerInfo) -> Tensor:
        return attend_row(q, keys, values, evolve(layer, window=4))


class RowsSwapped(Sound):
    def forward(
        self, q: Tensor, layer: LayerInfo, plan: Any, out: Tensor, lse: Tensor | None = None
    ) -> None:
        super().forward(q, layer, plan, out)
        if plan.phase is Phase.DECODE:
            out.copy_(out.flip(0))


class ZeroesTables(Sound):
    def plan(self, step: AttentionStep) -> Any:
        for table in step.page_tables:
            table.zero_()
        return evolve(step)


class WritesLengths(Sound):
    def plan(self, step: AttentionStep) -> Any:
        step.host_context_lens[:] += 1
        return evolve(step)


class ScalesQueries(Sound):
    def forward(
        self, q: Tensor, layer: LayerInfo, plan: Any, out: Tensor, lse: Tensor | None = None
    ) -> None:
        q.mul_(layer.scale)
        super().forward(q, evolve(layer, scale=1.0), plan, out)


class WritesPool(Sound):
    def forward(
        self, q: Tensor, layer: LayerInfo, plan: Any, out: Tensor, lse: Tensor | None = None
    ) -> None:
        super().forward(q, layer, plan, out)
        keys = self.kv[layer.index].k
        assert keys is not None
        keys.mul_(0.5)


class SharesPlan(Sound):
    def plan(self, step: AttentionStep) -> Any:
        self.host_query_lens, self.host_context_lens = step.host_query_lens, step.host_context_lens
        self.page_tables, self.phase = step.page_tables, step.phase
        return self


class LatestLengths(Sound):
    latest: Any = None

    def plan(self, step: AttentionStep) -> Any:
        before, self.latest = self.latest, step
        is_alike = before is not None and len(before.context_lens) == len(step.context_lens)
        if step.phase is not Phase.DECODE or not is_alike:
            return evolve(step)
        return evolve(step, host_context_lens=before.host_context_lens)


class Overflows(Sound):
    def attend(self, q: Tensor, keys: Tensor, values: Tensor, layer: LayerInfo) -> Tensor:
        out = attend_row(q, keys, values, layer)
        return out / 0 if layer.index == 2 and len(keys) > 14 else out
