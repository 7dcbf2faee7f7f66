"""Causal attention over the paged pool, one row after another."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headstock.spi import AttentionBackend, AttentionContext, AttentionStep, LayerInfo


class RowwiseBackend(AttentionBackend):
    """Gathers each row's keys and values, and leaves the mathematics to torch."""

    def __init__(self, context: AttentionContext) -> None:
        """Keep the pools, layer -> [pages, 2, page_size, kv_heads, head_dim]."""
        self.pools = context.pools

    def plan(self, step: AttentionStep) -> AttentionStep:
        """The step itself: its lengths are known on the host, and nothing else is needed."""
        return step

    def forward(
        self,
        q: Tensor,
        layer: LayerInfo,
        plan: AttentionStep,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> None:
        """Write the attention of the step's queries over their rows' pages.

        q: [tokens, heads, head_dim]
        writes: out [tokens, heads, head_dim]
        """
        pool = self.pools[layer.index]
        page_size = pool.shape[2]
        start = 0
        lengths = zip(plan.host_query_lens.tolist(), plan.host_context_lens.tolist(), strict=True)
        for row, (queries, context) in enumerate(lengths):
            pages = plan.page_tables[layer.group][row, : -(-context // page_size)]
            keys, values = pool[pages].transpose(0, 1).flatten(1, 2)[:, :context]
            # The queries are the last tokens of the context: query i sees i more than the first.
            seen = torch.ones(queries, context, dtype=torch.bool, device=q.device)
            attended = scaled_dot_product_attention(
                q[start : start + queries].transpose(0, 1),
                keys.transpose(0, 1),
                values.transpose(0, 1),
                attn_mask=seen.tril(context - queries),
                scale=layer.scale,
                enable_gqa=True,
            )
            out[start : start + queries] = attended.transpose(0, 1)
            start += queries

    def close(self) -> None:
        """Forget the pools."""
        self.pools = {}
