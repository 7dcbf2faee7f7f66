"""A layer's pool as rows of numbers, indexed by slots."""

from __future__ import annotations

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
    """

    keys: Tensor
    values: Tensor
    page_size: int
    page_slots: int
    is_latent: bool

    def read_values(self, keys: Tensor, slots: Tensor) -> Tensor:
        """The values at slots whose keys were read.   keys, returns: [n, kv_heads, dim]"""
        if self.is_latent:
            return keys[..., : self.values.shape[-1]]
        return self.values.index_select(0, slots)


def view_tokens(context: AttentionContext, index: int) -> TokenRows:
    """The rows of a layer's pool."""
    latent = context.kv[index].latent
    if latent is not None:
        keys = latent.view(-1, 1, latent.shape[-1])
        out_dim, page_size = context.layers[index].out_dim, latent.shape[1]
        return TokenRows(keys, keys[..., :out_dim], page_size, page_size, True)
    pool = context.pools[index]
    table, page_size = pool.view(-1, *pool.shape[3:]), pool.shape[2]
    # A page's values begin one page of keys later, so one list of slots serves both.
    return TokenRows(table, table[page_size:], page_size, 2 * page_size, False)
