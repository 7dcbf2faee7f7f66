"""An attention backend whose calls are checked, and compared with float32 if asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from headstock.debug.attention_reference import find_deviation
from headstock.debug.page_sums import PageSums, WatchedPages, view_vectors, view_words
from headstock.debug.watch import DebugWatch
from headstock.errors import PluginBroken
from headstock.spi import AttentionBackend, AttentionStep, KVLayer, LayerInfo, Phase


@frozen(eq=False)
class WatchedPlan:
    """The backend's plan; the step that it was made of, and a copy that the backend never saw.

    pages: by KV group, the pages of the step's tables
    """

    inner: Any
    step: AttentionStep
    copy: AttentionStep
    pages: dict[int, WatchedPages] = field(factory=dict)


class WatchedAttention(AttentionBackend):
    """Calls `inner`; raises PluginBroken when it writes what it may only read, or errs.

    Replays of graphs have no calls and are not watched.

    kv: the layers' pages by their parts
    pools: the same pages as they lie in memory
    compare: whether each call is compared with attention in float32
    """

    def __init__(
        self,
        inner: AttentionBackend,
        name: str,
        watch: DebugWatch,
        kv: Mapping[int, KVLayer],
        pools: Mapping[int, Tensor],
        *,
        compare: bool,
    ) -> None:
        self.inner = inner
        self.name = name
        self.watch = watch
        self.kv = kv
        self.pools = pools
        self.compare = compare
        self.last_plans: dict[bool, object] = {}
        self.vectors: dict[int, tuple[Tensor, ...]] = {}

    def plan(self, step: AttentionStep) -> WatchedPlan:
        """Plan by `inner`.   raises: PluginBroken when it writes the step, or returns one twice"""
        copy = _copy_step(step)
        inner = self.inner.plan(step)
        if self.watch.is_running:
            self._check_step(step, copy, "plan")
            is_decode = step.phase is Phase.DECODE
            # Two are alive with overlap, and two in a step of decode rows and others.
            if any(inner is last for last in self.last_plans.values()):
                raise PluginBroken(
                    f"{self._who} returned the same plan for two steps; both are alive when the "
                    "next step is planned while one computes"
                )
            self.last_plans[is_decode] = inner
        return WatchedPlan(inner, step, copy)

    def forward(
        self, q: Tensor, layer: LayerInfo, plan: Any, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend by `inner`, and check what it did.   writes: out    raises: PluginBroken"""
        # What a graph has in it was planned by `graph_plan` or `capture_plan`.
        if not isinstance(plan, WatchedPlan):
            self.inner.forward(q, layer, plan, out, lse)
            return
        if not self.watch.is_running:
            self.inner.forward(q, layer, plan.inner, out, lse)
            return
        q_before, before = q.clone(), self._sum_pages(layer, plan)
        self.inner.forward(q, layer, plan.inner, out, lse)
        if not torch.equal(view_words(q.contiguous()), view_words(q_before.contiguous())):
            raise PluginBroken(f"{self._who} wrote to the queries of layer {layer.index}")
        after = self._sum_pages(layer, plan)
        if not all(now.equals(then) for now, then in zip(after, before, strict=True)):
            raise PluginBroken(
                f"{self._who} wrote to the KV pool of layer {layer.index}, which it may only read"
            )
        self._check_step(plan.step, plan.copy, "forward")
        if self.compare:
            self._compare(q, layer, plan.copy, out)

    def _sum_pages(self, layer: LayerInfo, plan: WatchedPlan) -> list[PageSums]:
        """Sum what the pages of the step's tables hold in a layer, view by view."""
        if layer.index not in self.vectors:
            self.vectors[layer.index] = view_vectors(self.pools[layer.index], self.kv[layer.index])
        vectors = self.vectors[layer.index]
        if layer.group not in plan.pages:
            plan.pages[layer.group] = WatchedPages(
                torch.unique(plan.copy.page_tables[layer.group]).long(),
                vectors[0],
                int(plan.copy.host_context_lens.max(initial=0)),
                step=self.watch.num_steps,
                num_layers=len(self.kv),
            )
        return [plan.pages[layer.group].sum_words(view, layer.index) for view in vectors]

    def _compare(self, q: Tensor, layer: LayerInfo, step: AttentionStep, out: Tensor) -> None:
        """Raise PluginBroken when a row is further off than its type allows."""
        worst, largest = find_deviation(q, out, step, layer, self.kv[layer.index])
        if worst is not None:
            raise PluginBroken(
                f"{self._who} is off by {worst.error:.3g} in layer {layer.index}, phase "
                f"{step.phase.value}, row {worst.row}, from attention in float32 "
                f"({worst.allowed:.2g} is allowed; largest at its query token {worst.token}, head "
                f"{worst.head}; {int(step.host_context_lens[worst.row])} tokens are in context)"
            )
        self.watch.num_calls += 1
        self.watch.largest_error = max(self.watch.largest_error, largest)

    @property
    def _who(self) -> str:
        """The backend, as errors name it."""
        return f"the attention plugin {self.name!r}"

    def _check_step(self, step: AttentionStep, copy: AttentionStep, where: str) -> None:
        """Raise PluginBroken when the backend has written to a tensor of the step."""
        pairs = {
            "query_start": (step.query_start, copy.query_start),
            "context_lens": (step.context_lens, copy.context_lens),
        }
        for group, tables in enumerate(zip(step.page_tables, copy.page_tables, strict=True)):
            pairs[f"page_tables[{group}]"] = tables
        for name, (now, before) in pairs.items():
            if not torch.equal(now, before):
                raise PluginBroken(f"{self._who} wrote to {name} of its step in {where}")

    def close(self) -> None:
        """Close `inner`."""
        self.inner.close()

    @property
    def min_shared_tokens(self) -> int | None:
        """As `inner` has it."""
        return self.inner.min_shared_tokens

    def graph_init(self, buckets: Sequence[int], max_seq_len: int) -> None:
        """See `AttentionBackend.graph_init`."""
        self.inner.graph_init(buckets, max_seq_len)

    def graph_plan(self, bucket: int, step: AttentionStep) -> Any:
        """See `AttentionBackend.graph_plan`."""
        return self.inner.graph_plan(bucket, step)

    def graph_update(self, plan: Any, step: AttentionStep) -> None:
        """See `AttentionBackend.graph_update`."""
        self.inner.graph_update(plan, step)

    def capture_plan(self, step: AttentionStep) -> Any:
        """See `AttentionBackend.capture_plan`."""
        return self.inner.capture_plan(step)


def _copy_step(step: AttentionStep) -> AttentionStep:
    """Copy the tensors of a step that all backends get."""
    return evolve(
        step,
        query_start=step.query_start.clone(),
        context_lens=step.context_lens.clone(),
        page_tables=tuple(table.clone() for table in step.page_tables),
        host_query_lens=step.host_query_lens.copy(),
        host_context_lens=step.host_context_lens.copy(),
        shared=None,
    )
