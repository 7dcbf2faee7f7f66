"""Prefill and extend, row by row: visible keys and values gathered once, queries in blocks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from attrs import frozen
from torch import Tensor

from headstock.spi.attention import AttentionStep, LayerInfo
from headstock_sdpa.dense import sdpa_attention, softmax_in_float32
from headstock_sdpa.slots import ragged_slots, visible_positions
from headstock_sdpa.token_rows import TokenRows

BLOCK = 256
"""Queries that share one mask: bounds its size, and keys that only later blocks see are not
read."""
MOST_SCORED = 8192
"""Queries of all heads together whose scores are in memory at once."""


@frozen
class Row:
    """A row's intervals: its queries in the batch, its visible tokens among the gathered ones."""

    query_start: int
    query_stop: int
    position: int  # of the first query
    seen_start: int  # position of the first visible token
    slot_start: int
    slot_stop: int


@frozen(eq=False)
class RowsIndex:
    """The slots of each row's tokens in a step. slots: [visible tokens]"""

    rows: tuple[Row, ...]
    slots: Tensor


def rows_index(
    step: AttentionStep, page_table: Tensor, tokens: TokenRows, window: int | None
) -> RowsIndex:
    """The index of a step's rows for one group and window."""
    seen = visible_positions(step, window)
    query_stops = step.host_query_lens.cumsum()
    slot_stops = seen.lens.cumsum()
    columns = (
        query_stops - step.host_query_lens,
        query_stops,
        step.host_context_lens - step.host_query_lens,
        seen.start,
        slot_stops - seen.lens,
        slot_stops,
    )
    rows = tuple(Row(*row) for row in zip(*(column.tolist() for column in columns), strict=True))
    return RowsIndex(rows, ragged_slots(page_table, seen, tokens))


def attend_rows(
    q: Tensor,
    tokens: TokenRows,
    index: RowsIndex,
    layer: LayerInfo,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Write each row's causal attention.

    q: [tokens, heads, head_dim]
    writes: out [tokens, heads, out_dim]; lse [tokens, heads] float32, unless None
    """
    # Cases that torch's causal kernel does not support use masks and explicit scores.
    is_plain = lse is None and not layer.softcap and not tokens.is_latent
    block = BLOCK if is_plain else max(1, min(BLOCK, MOST_SCORED // q.shape[1]))
    for row in index.rows:
        slots = index.slots[row.slot_start : row.slot_stop]
        keys = tokens.read_keys(slots)
        k, v = (part.transpose(0, 1)[None] for part in (keys, tokens.read_values(keys, slots)))
        for queries, seen, mask in _query_blocks(row, layer, is_plain, block, q.device):
            args = (q[queries].transpose(0, 1)[None], k[:, :, seen], v[:, :, seen], mask)
            if is_plain:
                answer = sdpa_attention(*args, scale=layer.scale, causal=mask is None)
            else:
                answer, sums = softmax_in_float32(*args, scale=layer.scale, softcap=layer.softcap)
                if lse is not None:
                    lse[queries] = sums[0].transpose(0, 1)
            out[queries] = answer[0].transpose(0, 1)


def _query_blocks(
    row: Row, layer: LayerInfo, is_plain: bool, block: int, device: torch.device
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """The row in blocks of queries: queries in the batch, keys of the row, and the mask.

    A new row within the window is one block without a mask, for torch's causal kernel.

    yields: queries, keys, mask [queries, keys] bool
    """
    tokens = row.query_stop - row.query_start
    window = layer.window or row.position + tokens
    # torch's causal mask begins at the first key, which is only right if no token was computed
    # before.
    if row.position == 0 and window >= tokens and is_plain:
        yield slice(row.query_start, row.query_stop), slice(None), None
        return
    for start in range(row.query_start, row.query_stop, block):
        stop = min(start + block, row.query_stop)
        position = row.position + start - row.query_start
        end = position + stop - start
        begin = max(position - window + 1, 0)
        queries = torch.arange(position, end, device=device)[:, None]
        keys = torch.arange(begin, end, device=device)
        mask = (keys <= queries) & (keys > queries - window)
        yield slice(start, stop), slice(begin - row.seen_start, end - row.seen_start), mask
