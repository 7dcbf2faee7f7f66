"""Decode for any device and dtype: rows of similar length are gathered together and padded."""

from __future__ import annotations

from attrs import frozen
from torch import Tensor

from headstock.spi.attention import LayerInfo
from headstock_sdpa.dense import sdpa_attention, softmax_in_float32, write_rows
from headstock_sdpa.slots import PaddedBucket, Visible, decode_buckets
from headstock_sdpa.token_rows import TokenRows

MIN_SAVED_PADDING = 4096
"""Tokens of padding that cost as much as one more gather."""
MAX_GATHERED_TOKENS = 1 << 17
"""Tokens gathered at once, which bounds the memory."""


@frozen(eq=False)
class GatherIndex:
    """The rows of a decode step in buckets.

    order: [rows] batch row of each position in the buckets; None if in the batch's order
    """

    order: Tensor | None
    buckets: tuple[PaddedBucket, ...]


def gather_index(page_table: Tensor, seen: Visible, rows: TokenRows) -> GatherIndex:
    """The index of a decode step's rows for one group and window."""
    return GatherIndex(
        *decode_buckets(page_table, seen, rows, MIN_SAVED_PADDING, MAX_GATHERED_TOKENS)
    )


def gather_decode(
    q: Tensor,
    rows: TokenRows,
    index: GatherIndex,
    layer: LayerInfo,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Write the attention of each row's one query.

    q: [rows, heads, head_dim]
    writes: out [rows, heads, out_dim]; lse [rows, heads] float32, unless None
    """
    for bucket in index.buckets:
        slots = bucket.slots.flatten()
        keys = rows.read_keys(slots)
        k, v = (
            tokens.view(*bucket.slots.shape, *tokens.shape[1:]).transpose(1, 2)
            for tokens in (keys, rows.read_values(keys, slots))
        )
        mask = None if bucket.valid is None else bucket.valid[:, None, None]
        some = None if index.order is None else index.order[bucket.first : bucket.last]
        args = ((q if some is None else q.index_select(0, some))[:, :, None], k, v, mask)
        # `scaled_dot_product_attention` returns no LSE, bounds no scores, and copies the keys for
        # each head if values are narrower.
        if lse is None and not layer.softcap and not rows.is_latent:
            answer = sdpa_attention(*args, scale=layer.scale)
        else:
            answer, sums = softmax_in_float32(*args, scale=layer.scale, softcap=layer.softcap)
            if lse is not None:
                write_rows(lse, some, sums[:, :, 0])
        write_rows(out, some, answer[:, :, 0])
