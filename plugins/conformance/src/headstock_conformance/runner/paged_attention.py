"""Attention over pages in plain torch, which a graph of any step may capture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from attrs import define
from torch import Tensor

from headstock.spi import AttentionBackend, AttentionContext, AttentionStep, LayerInfo


@define(eq=False)
class PagedPlan:
    """What a step attends to: in a plan of a graph, tensors that stay at their addresses.

    query_start: [rows + 1] int32    context_lens: [rows] int32
    page_tables: one for each KV group, [rows, columns] int32
    """

    query_start: Tensor
    context_lens: Tensor
    page_tables: tuple[Tensor, ...]


class PagedAttention(AttentionBackend):
    """Reads lengths and page tables from the device alone, so that each step is planned alike."""

    def __init__(self, context: AttentionContext) -> None:
        self.context = context
        self.columns = 0

    @property
    def min_shared_tokens(self) -> int:
        """Pages that rows share are read as any other, and runners shall name them nevertheless."""
        return 1

    def plan(self, step: AttentionStep) -> PagedPlan:
        """The step's own tensors."""
        return PagedPlan(step.query_start, step.context_lens, step.page_tables)

    def capture_plan(self, step: AttentionStep) -> PagedPlan:
        """The step's own tensors, which are overwritten before each replay."""
        return self.plan(step)

    def graph_init(self, buckets: Sequence[int], max_seq_len: int) -> None:
        """Remember how many pages a row has at most."""
        self.columns = -(-max_seq_len // self.context.page_size)

    def graph_plan(self, bucket: int, step: AttentionStep) -> PagedPlan:
        """Rows of one token each, that have nothing but the dummy page yet."""
        device = step.context_lens.device
        return PagedPlan(
            torch.arange(bucket + 1, dtype=torch.int32, device=device),
            torch.ones(bucket, dtype=torch.int32, device=device),
            tuple(
                torch.zeros((bucket, self.columns), dtype=torch.int32, device=device)
                for _ in step.page_tables
            ),
        )

    def graph_update(self, plan: PagedPlan, step: AttentionStep) -> None:
        """Bring a plan of a graph up to date in place; rows that the step lacks are padding."""
        count = len(step.context_lens)
        plan.context_lens[:count].copy_(step.context_lens)
        plan.context_lens[count:].fill_(1)
        for table, given in zip(plan.page_tables, step.page_tables, strict=True):
            columns = given.shape[1]
            table.zero_()
            table[:count, :columns].copy_(given)

    def forward(
        self, q: Tensor, layer: LayerInfo, plan: Any, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Write causal attention; tokens behind the last row's are computed as if they were its."""
        context, size = self.context, self.context.page_size
        at = torch.arange(len(q), dtype=torch.int32, device=q.device)
        rows = torch.searchsorted(plan.query_start, at, right=True).sub_(1)
        rows.clamp_(max=len(plan.context_lens) - 1)
        ends = plan.query_start[1:].index_select(0, rows)
        own = plan.context_lens.index_select(0, rows) - (ends - at)
        pages = plan.page_tables[layer.group].index_select(0, rows).long()
        parts = context.kv[layer.index]
        keys, values = parts.k, parts.v
        if parts.latent is not None:
            keys = parts.latent[:, :, None]
            values = keys[..., : out.shape[-1]]
        assert keys is not None and values is not None
        ratio = q.shape[1] // keys.shape[2]
        length = pages.shape[1] * size
        keys, values = (
            part[pages].flatten(1, 2).repeat_interleave(ratio, 2).float() for part in (keys, values)
        )
        scores = torch.einsum("thd,tkhd->thk", q.float(), keys) * layer.scale
        other = torch.arange(length, device=q.device)
        unseen = (other > own[:, None]) | (other <= own[:, None] - (layer.window or length))
        unseen = unseen[:, None]
        # Finite, so that padding that sees nothing is no NaN.
        scores = scores.masked_fill(unseen, -math.inf).nan_to_num(nan=math.nan, neginf=-1e30)
        weights = scores.softmax(-1).masked_fill(unseen, 0.0)
        out.copy_(torch.einsum("thk,tkhd->thd", weights, values))

    def close(self) -> None:
        """Nothing is held."""
