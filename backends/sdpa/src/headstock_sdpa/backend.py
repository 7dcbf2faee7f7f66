"""Attention in plain torch over the paged pool."""

from __future__ import annotations

import torch
from attrs import Factory, evolve, frozen
from torch import Tensor

from headstock.nn.attention.merge import merge_prefixes
from headstock.nn.attention.sinks import scale_by_sinks
from headstock.spi.attention import (
    AttentionBackend,
    AttentionContext,
    AttentionStep,
    LayerInfo,
    Phase,
)
from headstock_sdpa.decode import GatherIndex, gather_decode, gather_index
from headstock_sdpa.rows import RowsIndex, attend_rows, rows_index
from headstock_sdpa.shared import PrefixIndex, attend_prefixes, prefix_index
from headstock_sdpa.slots import visible_positions
from headstock_sdpa.sparse import SparseIndex, allow_csr, sparse_decode, sparse_index
from headstock_sdpa.token_rows import TokenRows, view_tokens

Index = RowsIndex | GatherIndex | SparseIndex


@frozen(eq=False)
class SdpaPlan:
    """A step with an index of its tokens for each (group, window), made when first needed.

    prefixes: by KV group, for a step whose rows share pages
    rest: the plan of the tokens after those pages
    """

    step: AttentionStep
    rest: SdpaPlan | None = None
    indexes: dict[tuple[int, int | None], Index] = Factory(dict)
    prefixes: dict[int, PrefixIndex] = Factory(dict)


class SdpaBackend(AttentionBackend):
    """Prefill and extend row by row, decode all rows together. Nothing is kept between steps."""

    def __init__(self, context: AttentionContext) -> None:
        """Allocate nothing: no buffer outlives a step."""
        self.rows = {index: view_tokens(context, index) for index in context.pools}
        self.shares_prefixes = context.options.shared_prefix == "on"
        # 17 rows of 150 to 600 tokens take 369 us a layer this way, and 1,853 if each row's pages
        # are gathered, as for other types and devices (decision 0003).
        self.is_sparse = context.device.type == "cpu" and all(
            group.kv_dtype == "float32" for group in context.query.groups
        )
        if self.is_sparse:
            allow_csr()

    def plan(self, step: AttentionStep) -> SdpaPlan:
        """The step; its indexes are made when layers need them, without reading the device."""
        return SdpaPlan(step, None if step.shared is None else SdpaPlan(step.shared.rest))

    @property
    def min_shared_tokens(self) -> int | None:
        """By the option `shared_prefix`."""
        return 1 if self.shares_prefixes else None

    def forward(
        self, q: Tensor, layer: LayerInfo, plan: SdpaPlan, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Write causal attention of the step's queries over their rows' pages to `out`.

        q: [tokens, heads, head_dim]
        writes: out [tokens, heads, out_dim]; lse [tokens, heads] float32, natural logarithm,
            without sinks
        """
        if layer.k_scale != 1:
            layer = evolve(layer, scale=layer.scale * layer.k_scale)
        if layer.sinks is not None and lse is None:
            lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        self.attend(q, layer, plan, out, lse)
        if layer.sinks is not None and lse is not None:
            scale_by_sinks(out, lse, layer.sinks)
        if layer.v_scale != 1:
            out.mul_(layer.v_scale)

    def attend(
        self, q: Tensor, layer: LayerInfo, plan: SdpaPlan, out: Tensor, lse: Tensor | None
    ) -> None:
        """Attend as `forward`, without sinks.   writes: out, lse"""
        if plan.rest is not None and layer.window is None:
            self.attend_shared(q, layer, plan, plan.rest, out, lse)
            return
        rows = self.rows[layer.index]
        place = (layer.group, layer.window)
        index = plan.indexes.get(place)
        if index is None:
            index = plan.indexes[place] = self.make_index(plan.step, rows, layer, q.shape[1])
        match index:
            case SparseIndex():
                sparse_decode(q, rows, index, layer, out, lse)
            case GatherIndex():
                gather_decode(q, rows, index, layer, out, lse)
            case RowsIndex():
                attend_rows(q, rows, index, layer, out, lse)

    def attend_shared(
        self,
        q: Tensor,
        layer: LayerInfo,
        plan: SdpaPlan,
        rest: SdpaPlan,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Attend to shared prefixes once per group, to the rest row by row, and merge the two.

        writes: out, lse
        """
        rows, shared = self.rows[layer.index], plan.step.shared
        assert shared is not None
        index = plan.prefixes.get(layer.group)
        if index is None:
            index = plan.prefixes[layer.group] = prefix_index(shared, layer.group, rows)
        if lse is None:
            lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        self.attend(q, layer, rest, out, lse)
        merge_prefixes(out, lse, *attend_prefixes(q, rows, index, layer), shared.shared_lens)

    def make_index(
        self, step: AttentionStep, rows: TokenRows, layer: LayerInfo, heads: int
    ) -> Index:
        """The index of the tokens that the step's rows see in the layer's window."""
        page_table = step.page_tables[layer.group]
        if step.phase is not Phase.DECODE:
            return rows_index(step, page_table, rows, layer.window)
        seen = visible_positions(step, layer.window)
        # All heads share a latent vector: gathered once, it is used by all of them.
        if self.is_sparse and not rows.is_latent:
            # Also for one row: 128 tokens take 35 us a layer; gathering and
            # `scaled_dot_product_attention` take 45.
            return sparse_index(page_table, seen, rows, heads)
        return gather_index(page_table, seen, rows)

    def close(self) -> None:
        """Release the pools."""
        self.rows = {}
