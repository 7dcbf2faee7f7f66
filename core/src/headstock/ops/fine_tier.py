"""The coarse operations, made of fine ones that a set of operations may replace one by one."""

from __future__ import annotations

from abc import abstractmethod

import torch
from attrs import frozen
from torch import Tensor

from headstock.nn.kv import kv_cells
from headstock.nn.rope import CosSin
from headstock.spi import Batch, Experts, LayerConfig, ModelConfig, Ops, Params, Stream, Weight


@frozen(eq=False)
class ResidualStream:
    """The residual sum, which layers add to in place, and what the layers of a step share.

    hidden: [tokens, hidden]    cells: one a KV group, [tokens, 2] int64, where keys and values go
    """

    hidden: Tensor
    cos_sin: CosSin
    cells: tuple[Tensor, ...]


class FineTierOps(Ops):
    """The operations of a decoder, composed of finer ones that a subclass supplies.

    `TorchOps` defines what the finer ones mean. A subclass may replace any of either tier.
    """

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        """`x` normalized over its last dimension, times the weight.

        x, result: [tokens, hidden]
        """

    @abstractmethod
    def head_norm(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        """Each head normalized by itself.

        x, result: [tokens, heads, head_dim]
        weight: [heads, head_dim]
        """

    @abstractmethod
    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        """`x` through a linear map.

        x: [tokens, in]
        weight: [out, in]
        returns: [tokens, out]
        """

    @abstractmethod
    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """silu(first half) times the second half.

        gate_up: [tokens, 2 * n]
        returns: [tokens, n]
        """

    @abstractmethod
    def rotate_(self, x: Tensor, cos_sin: CosSin, out: Tensor) -> None:
        """Turn heads by their positions.

        x: [tokens, heads, head_dim]
        writes: out, of the same shape; it may be `x`
        """

    @abstractmethod
    def store_kv_(self, pool: Tensor, cells: Tensor, kv: Tensor) -> None:
        """Put keys and values into cells of the pool.

        kv: [tokens, 2, kv_heads, head_dim]
        writes: pool
        """

    @abstractmethod
    def mix_experts(
        self, x: Tensor, scores: Tensor, experts: Experts, gate_up: Weight, down: Weight
    ) -> Tensor:
        """What the experts that `scores` favour make of each token.

        x, result: [tokens, hidden]    scores: [tokens, experts]
        """

    @abstractmethod
    def lookup(self, tokens: Tensor, weight: Weight) -> Tensor:
        """The tokens' embeddings.

        tokens: [tokens] int64
        weight: [vocab, hidden]
        returns: [tokens, hidden]
        """

    def embed(self, params: Params, config: ModelConfig, batch: Batch) -> Stream:
        """The stream at the batch's tokens."""
        hidden = self.lookup(batch.tokens, params["embed"])
        cos_sin = CosSin.at_positions(params["rope"].tensor, batch.positions, hidden.dtype)
        page_sizes = [batch.pools[group.layers[0]].shape[2] for group in config.kv_groups]
        # Cells and rotations are worked out once a step, since all layers of a group use the same.
        return ResidualStream(hidden, cos_sin, tuple(map(kv_cells, batch.slots, page_sizes)))

    def qkv_rope_store(
        self,
        x: Stream,
        params: Params,
        config: ModelConfig,
        layer: LayerConfig,
        batch: Batch,
    ) -> Tensor:
        """Queries of the layer.

        returns: [tokens, heads, head_dim]
        writes: batch.pools[layer.index]
        """
        turned, both = config.heads + config.kv_heads, 2 * config.kv_heads
        normed = self.rms_norm(x.hidden, params[f"{layer.prefix}attn_norm"], config.norm_eps)
        qkv = self.linear(normed, params[f"{layer.prefix}qkv"])
        qkv = qkv.view(-1, config.heads + both, config.head_dim)
        qk = heads = qkv[:, :turned]
        if config.qk_norm:
            # Queries and keys in one norm: the weight has a row a head.
            heads = self.head_norm(qk, params[f"{layer.prefix}qk_norm"], config.norm_eps)
        # Turned in place, so that keys and values stay side by side and are stored by one
        # operation.
        self.rotate_(heads, x.cos_sin, qk)
        kv = qkv[:, config.heads :].view(-1, 2, config.kv_heads, config.head_dim)
        self.store_kv_(batch.pools[layer.index], x.cells[layer.group], kv)
        return qkv[:, : config.heads]

    def attn_out(
        self,
        x: Stream,
        attention: Tensor,
        params: Params,
        config: ModelConfig,
        layer: LayerConfig,
        batch: Batch,
    ) -> Stream:
        """The stream with the projected attention added.

        attention: [tokens, heads, head_dim]
        writes: x
        """
        x.hidden.add_(
            self.all_reduce(self.linear(attention.flatten(1), params[f"{layer.prefix}attn_out"]))
        )
        return x

    def mlp(
        self,
        x: Stream,
        params: Params,
        config: ModelConfig,
        layer: LayerConfig,
        batch: Batch,
    ) -> Stream:
        """The stream with the layer's feed-forward part added.   writes: x"""
        normed = self.rms_norm(x.hidden, params[f"{layer.prefix}mlp_norm"], config.norm_eps)
        inner = self.silu_and_mul(self.linear(normed, params[f"{layer.prefix}gate_up"]))
        x.hidden.add_(self.all_reduce(self.linear(inner, params[f"{layer.prefix}down"])))
        return x

    def moe(
        self,
        x: Stream,
        params: Params,
        config: ModelConfig,
        layer: LayerConfig,
        batch: Batch,
    ) -> Stream:
        """The stream with the layer's mixture of experts added.   writes: x"""
        assert layer.experts is not None
        normed = self.rms_norm(x.hidden, params[f"{layer.prefix}mlp_norm"], config.norm_eps)
        scores = self.linear(normed, params[f"{layer.prefix}router"])
        gate_up, down = (
            params[f"{layer.prefix}experts_gate_up"],
            params[f"{layer.prefix}experts_down"],
        )
        x.hidden.add_(
            self.all_reduce(self.mix_experts(normed, scores, layer.experts, gate_up, down))
        )
        return x

    def final_norm(self, x: Stream, params: Params, config: ModelConfig, batch: Batch) -> Tensor:
        """The normalized hidden states.   returns: [tokens, hidden]"""
        return self.rms_norm(x.hidden, params["norm"], config.norm_eps)

    def lm_head(self, params: Params, config: ModelConfig, hidden: Tensor) -> Tensor:
        """Scores.   hidden: [n, hidden]    returns: [n, vocab] float32"""
        head = params["embed" if config.tied_embeddings else "lm_head"]
        return self.all_gather(self.linear(hidden, head)).to(torch.float32)
