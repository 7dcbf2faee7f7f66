"""Leading pages that several decode rows share, read once for all of them."""

from __future__ import annotations

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from headstock.spi.attention import LayerInfo, SharedPrefixes
from headstock_sdpa.dense import softmax_in_float32
from headstock_sdpa.slots import Visible, ragged_slots
from headstock_sdpa.token_rows import TokenRows


@frozen(eq=False)
class PrefixIndex:
    """The rows of each group, and the slots of their shared tokens.

    groups: (first row, last row, slots [tokens])
    """

    groups: tuple[tuple[int, int, Tensor], ...]


def prefix_index(shared: SharedPrefixes, group: int, rows: TokenRows) -> PrefixIndex:
    """The index of a step's groups for one KV group."""
    step = shared.prefixes
    lens = step.host_context_lens
    seen = Visible(np.zeros_like(lens), lens, lens)
    slots = torch.split(ragged_slots(step.page_tables[group], seen, rows), lens.tolist())
    stops = step.host_query_lens.cumsum()
    starts = stops - step.host_query_lens
    return PrefixIndex(tuple(zip(starts.tolist(), stops.tolist(), slots, strict=True)))


def attend_prefixes(
    q: Tensor, rows: TokenRows, index: PrefixIndex, layer: LayerInfo
) -> tuple[Tensor, Tensor]:
    """Attention of each group's rows over all shared tokens.

    q: [rows, heads, head_dim]
    returns: [rows, heads, out_dim] in q's type, LSE [rows, heads] float32; undefined for rows
        without a group
    """
    out, lse = layer.empty_output(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    for first, last, slots in index.groups:
        keys = rows.read_keys(slots)
        k, v = (part.transpose(0, 1)[None] for part in (keys, rows.read_values(keys, slots)))
        queries = q[first:last].transpose(0, 1)[None]
        answer, sums = softmax_in_float32(
            queries, k, v, None, scale=layer.scale, softcap=layer.softcap
        )
        out[first:last], lse[first:last] = answer[0].transpose(0, 1), sums[0].t()
    return out, lse
