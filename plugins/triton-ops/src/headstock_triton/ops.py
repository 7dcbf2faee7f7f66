"""The operations of a decoder, each a product and one fused kernel before or after it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from headstock.ops.torch_ops import TorchOps
from headstock.spi import (
    Batch,
    LayerConfig,
    ModelConfig,
    Params,
    QkNorm,
    Sample,
    Sampling,
    Stream,
    Variant,
    Weight,
    find_variants,
)
from headstock_triton.activation import fused_silu_and_mul
from headstock_triton.experts import fused_mix_experts
from headstock_triton.heads import rope_and_store_kv
from headstock_triton.linear import small_linear
from headstock_triton.norm import add_norm, embed_norm
from headstock_triton.options import TritonOptions
from headstock_triton.sampler import fused_sample

COMMON = frozenset((Variant.WIDE_NORM,))
"""What all fused operations do: the kernels widen what they load."""

FUSED: Mapping[str, frozenset[Variant]] = {
    "embed": COMMON,
    "qkv_rope_store": COMMON | {Variant.HEAD_QK_NORM, Variant.PARTIAL_ROPE, Variant.ROPE_BY_LAYER},
    "attn_out": frozenset(),
    "mlp": COMMON,
    "moe": COMMON,
    "final_norm": COMMON,
    "lm_head_sample": frozenset(),
}
"""Operations with kernels of their own -> what they do beyond a plain decoder."""


def _normalize(x: Stream, weight: Weight, eps: float) -> Tensor:
    """The stream normalized, in one kernel with the addition of what is pending.

    returns: [tokens, hidden]
    writes: x, which has nothing pending then
    """
    normed = x.normed
    if normed is None:
        normed = add_norm(x.total, x.pending, weight.tensor, eps)
    x.pending = x.normed = None
    return normed


def _add_pending(x: Stream, term: Tensor) -> Stream:
    """The stream with the term pending.   writes: x, which is the result"""
    x.settle()
    x.pending = term
    return x


class TritonOps(TorchOps):
    """`TorchOps` with all that lies between matrix products fused; options replace products too."""

    def __init__(self, options: TritonOptions | None = None) -> None:
        options = options or TritonOptions()
        self.small_linear = options.small_linear
        self.fused_experts = options.fused_experts

    def takes(self, operation: str, config: ModelConfig, layer: LayerConfig | None) -> bool:
        """Whether a kernel does all that the configuration asks of the operation."""
        return operation in FUSED and find_variants(operation, config, layer) <= FUSED[operation]

    def rms_norm(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        """See `headstock_triton.norm.add_norm`, which adds nothing here."""
        return add_norm(x.contiguous(), None, weight.tensor, eps)

    def linear(self, x: Tensor, weight: Weight, batch: Batch | None) -> Tensor:
        """x W^T + b.   x: [tokens, in]    weight: [out, in]    returns: [tokens, out]"""
        if 0 < len(x) <= self.small_linear and x.dtype.itemsize == 2:
            return small_linear(x, weight.tensor, weight.bias)
        return super().linear(x, weight, batch)

    def embed(self, params: Params, config: ModelConfig, batch: Batch) -> Stream:
        """The stream at the batch's tokens, and what the first layer's norm makes of it."""
        weight = params[f"{config.layers[0].prefix}attn_norm"].tensor
        total, normed = embed_norm(batch.tokens, params["embed"].tensor, weight, config.norm_eps)
        return Stream(total, None, normed)

    def qkv_rope_store(
        self, x: Stream, params: Params, config: ModelConfig, layer: LayerConfig, batch: Batch
    ) -> Tensor:
        """Queries of the layer.

        returns: [tokens, heads, head_dim]
        writes: batch.pools[layer.index]
        """
        normed = _normalize(x, params[f"{layer.prefix}attn_norm"], config.norm_eps)
        return rope_and_store_kv(
            self.linear(normed, params[f"{layer.prefix}qkv"], batch),
            params[f"{layer.prefix}qk_norm"].tensor if config.qk_norm is QkNorm.HEAD else None,
            params[f"rope.{layer.rope}"].tensor,
            batch.positions,
            batch.slots[layer.group],
            batch.pools[layer.index],
            heads=config.heads,
            eps=config.norm_eps,
        )

    def attn_out(
        self,
        x: Stream,
        attention: Tensor,
        params: Params,
        config: ModelConfig,
        layer: LayerConfig,
        batch: Batch,
    ) -> Stream:
        """The stream with the projected attention pending.

        attention: [tokens, heads, head_dim]
        writes: x
        """
        return _add_pending(
            x,
            self.all_reduce(
                self.linear(attention.flatten(1), params[f"{layer.prefix}attn_out"], batch)
            ),
        )

    def mlp(
        self, x: Stream, params: Params, config: ModelConfig, layer: LayerConfig, batch: Batch
    ) -> Stream:
        """The stream with the layer's feed-forward part pending.   writes: x"""
        normed = _normalize(x, params[f"{layer.prefix}mlp_norm"], config.norm_eps)
        inner = fused_silu_and_mul(self.linear(normed, params[f"{layer.prefix}gate_up"], batch))
        return _add_pending(
            x, self.all_reduce(self.linear(inner, params[f"{layer.prefix}down"], batch))
        )

    def moe(
        self, x: Stream, params: Params, config: ModelConfig, layer: LayerConfig, batch: Batch
    ) -> Stream:
        """The stream with the layer's mixture of experts pending.   writes: x"""
        assert layer.experts is not None
        normed = _normalize(x, params[f"{layer.prefix}mlp_norm"], config.norm_eps)
        scores = self.linear(normed, params[f"{layer.prefix}router"], batch)
        gate_up, down = (
            params[f"{layer.prefix}experts_gate_up"],
            params[f"{layer.prefix}experts_down"],
        )
        if self.fused_experts and normed.dtype.itemsize == 2:
            # Padding goes to no expert: else each padding row of a graph would read the weights
            # of as many experts as a row uses.
            page_size = batch.pools[layer.index].shape[2]
            slots = batch.slots[layer.group]
            mixed = fused_mix_experts(
                normed,
                scores,
                layer.experts,
                gate_up.tensor,
                down.tensor,
                slots=slots,
                page_size=page_size,
            )
        else:
            weights, ids = self.route(scores, layer.experts, None)
            mixed = self.mix_experts(normed, weights, ids, gate_up, down, config.activation, batch)
        return _add_pending(x, self.all_reduce(mixed))

    def final_norm(self, x: Stream, params: Params, config: ModelConfig, batch: Batch) -> Tensor:
        """The normalized hidden states.   returns: [tokens, hidden]"""
        return _normalize(x, params["norm"], config.norm_eps)

    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        """See `headstock_triton.sampler.fused_sample`."""
        return fused_sample(logits, sampling)

    def lm_head_sample(
        self, params: Params, config: ModelConfig, hidden: Tensor, sampling: Sampling
    ) -> Sample:
        """Tokens sampled from the scores of `hidden` [n, hidden], in the type of the product."""
        head = params["embed" if config.tied_embeddings else "lm_head"]
        # No copy in float32: the kernels widen what they load.
        return fused_sample(self.all_gather(self.linear(hidden, head, None)), sampling)
