"""Leading pages that several decode rows share, read once for all of them."""

from __future__ import annotations

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from headstock.spi.attention import LayerInfo, SharedPrefixes
from headstock_sdpa.dense import softmax_in_float32
from headstock_sdpa.slots import Visible, ragged_slots


@frozen(eq=False)
class PrefixIndex:
    """The rows of each group, and where the tokens are that they share.

    groups: (first row, last row, slots [tokens])
    """

    groups: tuple[tuple[int, int, Tensor], ...]


def prefix_index(shared: SharedPrefixes, group: int, page_size: int) -> PrefixIndex:
    """The index of a step's groups for one KV group."""
    step = shared.prefixes
    lens = step.host_context_lens
    seen = Visible(np.zeros_like(lens), lens, lens)
    slots = torch.split(ragged_slots(step.page_tables[group], seen, page_size), lens.tolist())
    stops = step.host_query_lens.cumsum()
    starts = stops - step.host_query_lens
    return PrefixIndex(tuple(zip(starts.tolist(), stops.tolist(), slots, strict=True)))


def attend_prefixes(
    q: Tensor, pool: Tensor, index: PrefixIndex, layer: LayerInfo
) -> tuple[Tensor, Tensor]:
    """Attention of each group's rows over all that they share.

    q: [rows, heads, head_dim]    pool: [pages, 2, page_size, kv_heads, head_dim]
    returns: [rows, heads, head_dim] in q's type, LSE [rows, heads] float32; undefined for rows of
        no group
    """
    table = pool.view(-1, *pool.shape[3:])
    # A page's values begin one page of keys later: one list of slots serves both.
    values = table[pool.shape[2] :]
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    for first, last, slots in index.groups:
        k, v = (rows.index_select(0, slots).transpose(0, 1)[None] for rows in (table, values))
        queries = q[first:last].transpose(0, 1)[None]
        answer, sums = softmax_in_float32(
            queries, k, v, None, scale=layer.scale, softcap=layer.softcap
        )
        out[first:last], lse[first:last] = answer[0].transpose(0, 1), sums[0].t()
    return out, lse
