"""Queries of attention over latent vectors (DeepSeek-V2, arXiv 2405.04434)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from headstock.nn.rope import CosSin
from headstock.spi import Batch, LayerConfig, ModelConfig, Params, Weight


class _FineOps(Protocol):
    """The fine operations that are used here, and what they are bound to."""

    params: Params
    config: ModelConfig

    def linear(self, x: Tensor, weight: Weight, batch: Batch | None) -> Tensor: ...
    def head_linear(self, x: Tensor, weight: Weight) -> Tensor: ...
    def rms_norm(self, x: Tensor, weight: Weight, eps: float) -> Tensor: ...
    def rotate_(self, x: Tensor, cos_sin: CosSin, out: Tensor) -> None: ...
    def store_latent_(self, pool: Tensor, slots: Tensor, latent: Tensor) -> None: ...


def make_latent_queries(
    ops: _FineOps,
    normed: Tensor,
    cos_sin: CosSin,
    layer: LayerConfig,
    batch: Batch,
) -> Tensor:
    """Queries of the layer, and the latent vectors of its tokens in the pool.

    A query's product with a vector is the score of the head: the map that would make the head's key
    of the vector is multiplied into the part of the query that is not turned.

    normed: [tokens, hidden]    cos_sin: of the part that is turned
    returns: [tokens, heads, kv_rank + rope_dim]
    writes: batch.kv[layer.index].latent at batch.slots[layer.group]
    """
    latent, prefix, pool = layer.latent, layer.prefix, batch.kv[layer.index].latent
    assert latent is not None and pool is not None, "such a layer is in a latent group"
    rank, eps = latent.kv_rank, latent.norm_eps
    low = ops.linear(normed, ops.params[f"{prefix}latent"], batch)
    if latent.q_rank is not None:
        compressed, low = low[:, : latent.q_rank], low[:, latent.q_rank :]
        normed = ops.rms_norm(compressed, ops.params[f"{prefix}q_latent_norm"], eps)
    stored = torch.empty_like(low, memory_format=torch.contiguous_format)
    stored[:, :rank] = ops.rms_norm(low[:, :rank], ops.params[f"{prefix}kv_latent_norm"], eps)
    ops.rotate_(low[:, None, rank:], cos_sin, stored[:, None, rank:])
    scaled = stored if layer.k_scale == 1 else stored.float() * (1 / layer.k_scale)
    ops.store_latent_(pool, batch.slots[layer.group], scaled)
    heads = ops.config.sizes_of(layer).heads
    q = ops.linear(normed, ops.params[f"{prefix}q_up"], batch).view(len(low), heads, -1)
    queries = q.new_empty(len(low), heads, stored.shape[1])
    queries[..., :rank] = ops.head_linear(q[..., : latent.nope_dim], ops.params[f"{prefix}k_up"])
    ops.rotate_(q[..., latent.nope_dim :], cos_sin, queries[..., rank:])
    return queries
