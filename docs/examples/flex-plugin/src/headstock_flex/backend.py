"""Causal attention over the paged pool by FlexAttention, all rows of a step at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from attrs import define, field
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from headstock.spi import AttentionBackend, AttentionContext, AttentionStep, LayerInfo

BLOCK = 128
"""Lengths are rounded up to blocks, so that few shapes are compiled."""


@define(eq=False)
class FlexPlan:
    """A step as a padded batch.

    places: [tokens] int64, where each query token lies in [rows * queries]
    first: [rows] int64, the position of each row's first query token
    masks: made for each window when the first layer with it asks
    """

    step: AttentionStep
    queries: int
    context: int
    places: Tensor
    first: Tensor
    masks: dict[int | None, BlockMask] = field(factory=dict)

    def mask(self, window: int | None) -> BlockMask:
        """Which keys each query sees: those up to its own position, within the window."""
        if window not in self.masks:
            first, device = self.first, self.first.device

            def is_seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                own = first[row] + query
                seen = key <= own
                return seen if window is None else seen & (key > own - window)

            sizes = (self.step.num_rows, None, self.queries, self.context)
            self.masks[window] = create_block_mask(is_seen, *sizes, device=device)
        return self.masks[window]


class FlexBackend(AttentionBackend):
    """Gathers the pages of all rows, and leaves masks, scores and softmax to FlexAttention."""

    def __init__(self, context: AttentionContext) -> None:
        """Keep the pools, layer -> [pages, 2, page_size, kv_heads, head_dim]."""
        self.pools = context.pools
        wanted = context.options.compile
        is_compiled = wanted == "on" or (wanted == "auto" and context.device.type == "cuda")
        self.attend: Callable[..., Any] = (
            torch.compile(flex_attention, dynamic=True) if is_compiled else attend_eagerly
        )

    def plan(self, step: AttentionStep) -> FlexPlan:
        """Sizes and positions from the host's lengths; a new plan each time, as two are alive."""
        device = step.context_lens.device
        queries = round_up(step.max_query_len) if step.max_query_len > 1 else 1
        lens = step.host_query_lens
        starts = np.cumsum(lens) - lens
        rows = np.repeat(np.arange(len(lens)), lens)
        places = rows * queries + np.arange(len(rows)) - np.repeat(starts, lens)
        return FlexPlan(
            step=step,
            queries=queries,
            context=round_up(step.max_context_len),
            places=torch.from_numpy(places).to(device),
            first=torch.from_numpy((step.host_context_lens - lens).astype(np.int64)).to(device),
        )

    def forward(
        self,
        q: Tensor,
        layer: LayerInfo,
        plan: FlexPlan,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> None:
        """Write the attention of the step's queries over their rows' pages.

        q: [tokens, heads, head_dim]
        writes: out [tokens, heads, head_dim], lse [tokens, heads]
        """
        rows, (_, heads, head_dim) = plan.step.num_rows, q.shape
        padded = q.new_zeros(rows * plan.queries, heads, head_dim)
        padded[plan.places] = q
        keys, values = gather_pages(
            self.pools[layer.index], plan.step.page_tables[layer.group], plan.context
        )

        def bound(score: Tensor, *where: Tensor) -> Tensor:
            return layer.softcap * torch.tanh(score / layer.softcap)

        found, sums = self.attend(
            padded.view(rows, plan.queries, heads, head_dim).transpose(1, 2),
            keys,
            values,
            score_mod=bound if layer.softcap else None,
            block_mask=plan.mask(layer.window),
            scale=layer.scale,
            enable_gqa=True,
            return_aux=AuxRequest(lse=True),
        )
        out.copy_(found.transpose(1, 2).flatten(0, 1)[plan.places])
        if lse is not None:
            lse.copy_(sums.lse.transpose(1, 2).flatten(0, 1)[plan.places])

    def close(self) -> None:
        """Forget the pools."""
        self.pools = {}


def attend_eagerly(*tensors: Tensor, **terms: Any) -> Any:
    """FlexAttention without a compiler: torch else traces every shape anew, and gives up after a
    few.
    """
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        # It warns that all scores are written out, which is what was asked for.
        warnings.simplefilter("ignore", UserWarning)
        return flex_attention(*tensors, **terms)


def gather_pages(pool: Tensor, table: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """The keys and values of each row; past its end lies what the dummy page has.

    pool: [pages, 2, page_size, kv_heads, head_dim]    table: [rows, columns]
    returns: twice [rows, kv_heads, context, head_dim]
    """
    size = pool.shape[2]
    place = torch.arange(context, device=table.device)
    column = place // size
    # A row has no column for what the rounding adds: page 0, which is finite.
    pages = table.new_zeros(len(table), context)
    is_there = column < table.shape[1]
    pages[:, is_there] = table[:, column[is_there]]
    cells = pool[pages.long(), :, place % size]
    return cells[:, :, 0].transpose(1, 2), cells[:, :, 1].transpose(1, 2)


def round_up(length: int) -> int:
    """The length in whole blocks."""
    return -(-length // BLOCK) * BLOCK
