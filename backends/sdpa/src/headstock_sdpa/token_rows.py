"""A layer's pool as rows of numbers, indexed by slots."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from headstock.spi.attention import AttentionContext


@frozen(eq=False)
class TokenRows:
    """Views of a pool by slots; the key and the value of a token have the same slot.

    keys: [slots, kv_heads, k_dim]
    values: [slots, kv_heads, v_dim]
    page_size: tokens of a page
    page_slots: slots from the first of a page to the first of the next
    is_latent: a value is the first part of its key, and all heads share it
    dtype: what keys and values are read as
    """

    keys: Tensor
    values: Tensor
    page_size: int
    page_slots: int
    is_latent: bool
    dtype: torch.dtype

    def read_keys(self, slots: Tensor) -> Tensor:
        """The keys at slots.   returns: [n, kv_heads, k_dim]"""
        return self._read(self.keys, slots)

    def read_values(self, keys: Tensor, slots: Tensor) -> Tensor:
        """The values at slots whose keys were read.   keys, returns: [n, kv_heads, dim]"""
        if self.is_latent:
            return keys[..., : self.values.shape[-1]]
        return self._read(self.values, slots)

    def _read(self, table: Tensor, slots: Tensor) -> Tensor:
        """The rows of a table at slots."""
        if table.dtype is self.dtype:
            return table.index_select(0, slots)
        # Indexing knows 8-bit floats only as bytes.
        rows = table.view(torch.uint8).index_select(0, slots)
        return rows.view(table.dtype).to(self.dtype)


def view_tokens(context: AttentionContext, index: int) -> TokenRows:
    """The rows of a layer's pool."""
    latent, group = context.kv[index].latent, context.layers[index].group
    dtype = getattr(torch, context.query.groups[group].q_dtype)
    if latent is not None:
        keys = latent.view(-1, 1, latent.shape[-1])
        out_dim, page_size = context.layers[index].out_dim, latent.shape[1]
        return TokenRows(keys, keys[..., :out_dim], page_size, page_size, True, dtype)
    pool = context.pools[index]
    table, page_size = pool.view(-1, *pool.shape[3:]), pool.shape[2]
    # A page's values begin one page of keys later, so one list of slots serves both.
    return TokenRows(table, table[page_size:], page_size, 2 * page_size, False, dtype)
