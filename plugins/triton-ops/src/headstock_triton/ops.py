"""The operations of a decoder, each a product and one fused kernel before or after it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headstock.ops.fine_tier import find_conv_inputs
from headstock.ops.torch_ops import TorchOps
from headstock.spi import (
    Batch,
    DeviceEnv,
    LayerConfig,
    ModelConfig,
    PartQuery,
    QkNorm,
    Sample,
    Sampling,
    Stream,
    Variant,
    Weight,
    find_variants,
)
from headstock_triton.activation import fused_silu_and_mul
from headstock_triton.conv import convolve_gated_
from headstock_triton.experts import fused_mix_experts
from headstock_triton.gated_linear import (
    LEAST_TOKENS,
    choose_large_tile,
    count_processors,
    multiply_gated_tiles,
)
from headstock_triton.heads import rope_and_store_kv
from headstock_triton.linear import can_add, can_fuse, small_linear
from headstock_triton.norm import add_norm, embed_norm
from headstock_triton.options import MOST_TOKENS, TritonOptions
from headstock_triton.pdl import has_pdl
from headstock_triton.sampling.sampler import fused_sample
from headstock_triton.split_linear import (
    choose_gated_tile,
    choose_split_tile,
    multiply_gated,
    multiply_in_parts,
)
from headstock_triton.tiles import is_hopper, read_tables
from headstock_triton.tune_experts import tune_experts

COMMON = frozenset((Variant.WIDE_NORM,))
"""Variants that all fused operations support: the kernels widen their inputs."""

FUSED: Mapping[str, frozenset[Variant]] = {
    "embed": COMMON,
    "qkv_rope_store": COMMON | {Variant.HEAD_QK_NORM, Variant.PARTIAL_ROPE, Variant.ROPE_BY_LAYER},
    "attn_out": frozenset(),
    "short_conv": COMMON,
    "mlp": COMMON,
    "moe": COMMON,
    "final_norm": COMMON,
    "lm_head_sample": frozenset(),
}
"""Operations with separate kernels -> the variants that they support."""


def _normalize(x: Stream, weight: Weight, eps: float, *, pdl: bool) -> Tensor:
    """The normalized stream, in one kernel with the addition of the pending term.

    returns: [tokens, hidden]
    writes: x, which then has nothing pending
    """
    normed = x.normed
    if normed is None:
        normed = add_norm(x.total, x.pending, weight.tensor, eps, pdl=pdl)
    x.pending = x.normed = None
    return normed


def _add_pending(x: Stream, term: Tensor) -> Stream:
    """The stream with the term pending.   writes: x, which is the result"""
    x.settle()
    x.pending = term
    return x


class TritonOps(TorchOps):
    """`TorchOps` with all operations between matrix products fused; options replace products
    too."""

    def __init__(self, options: TritonOptions | None = None) -> None:
        options = options or TritonOptions()
        self.small_linear = options.small_linear
        self.fused_experts = options.fused_experts
        self.expert_tiles = read_tables(options.expert_tiles)
        self.fused_linear = options.fused_linear
        self.split_linear = options.split_linear
        self.large_linear = options.large_linear
        self.pdl = options.pdl

    def configure(self, query: PartQuery, env: DeviceEnv) -> None:
        """See `Ops.configure`."""
        # Terms that are summed over ranks first cannot be added where they are computed.
        if query.model.shard.count > 1:
            self.fused_linear = self.split_linear = 0
            self.large_linear = False

    def tune(self, query: PartQuery, env: DeviceEnv) -> Mapping[str, str]:
        """Tiles of the model's experts, measured on the device."""
        dtype = getattr(torch, query.dtype)
        if not self.fused_experts or dtype.itemsize != 2 or env.device != "cuda":
            return {}
        model = query.model
        mixtures = [
            layer.experts
            for layer in model.layers
            if layer.experts is not None and self.takes("moe", model, layer)
        ]
        return tune_experts(mixtures, model.hidden, dtype, torch.device(env.device))

    def takes(self, operation: str, config: ModelConfig, layer: LayerConfig | None) -> bool:
        """Whether a kernel supports all variants of the operation in this configuration."""
        return operation in FUSED and find_variants(operation, config, layer) <= FUSED[operation]

    def overlaps(self, x: Tensor) -> bool:
        """Whether the kernels of a step of `len(x)` tokens begin while the ones before them end."""
        # Larger steps are mostly torch's products, which wait for all kernels before them.
        return self.pdl and len(x) <= max(MOST_TOKENS, self.split_linear) and has_pdl(x.device)

    def is_fused(self, x: Stream) -> bool:
        """Whether products include the norm before them and the sum after them."""
        (tokens, hidden), total = x.total.shape, x.total
        return (
            0 < tokens <= self.fused_linear
            and total.dtype.itemsize == 2
            and can_fuse(tokens, hidden, total.device)
        )

    def multiply_normed(
        self,
        x: Stream,
        norm: Weight,
        weight: Weight,
        eps: float,
        batch: Batch,
        *,
        gated: bool = False,
    ) -> Tensor:
        """The normalized stream times the weight; `gated`: with the activation.

        returns: [tokens, out], or half of it
        """
        pdl = self.overlaps(x.total)
        # A term left pending by an operation that is not fused is added by a separate norm.
        if self.is_fused(x) and x.pending is None:
            x.normed = None
            return small_linear(
                x.total,
                weight.tensor,
                weight.bias,
                norm=norm.tensor,
                eps=eps,
                gated=gated,
                pdl=pdl,
            )
        normed = _normalize(x, norm, eps, pdl=pdl)
        if not gated:
            return self.linear(normed, weight, batch)
        if weight.bias is None and normed.dtype.itemsize == 2:
            tokens, inters = len(normed), len(weight.tensor) // 2
            if tokens <= self.split_linear:
                small = choose_gated_tile(tokens, normed.shape[1], inters)
                if small is not None:
                    return multiply_gated(normed, weight.tensor, small, pdl=pdl)
            if self.large_linear and is_hopper(normed.device):
                processors = count_processors(normed.device)
                large = choose_large_tile(tokens, normed.shape[1], inters, processors=processors)
                if large is not None:
                    return multiply_gated_tiles(normed, weight.tensor, large)
        return fused_silu_and_mul(self.linear(normed, weight, batch), pdl=pdl)

    def add_product(self, x: Stream, term: Tensor, weight: Weight, batch: Batch) -> Stream:
        """The stream with `term` times the weight, added or pending.   writes: x"""
        if self.is_fused(x) and can_add(len(term), term.shape[1], term.device):
            x.settle()
            small_linear(term, weight.tensor, weight.bias, total=x.total, pdl=self.overlaps(term))
            return x
        if weight.bias is None and term.dtype.itemsize == 2:
            tokens, width = term.shape
            if tokens <= self.split_linear:
                tile = choose_split_tile(tokens, width, len(weight.tensor))
                if tile is not None:
                    pdl = self.overlaps(term)
                    return _add_pending(x, multiply_in_parts(term, weight.tensor, tile, pdl=pdl))
            if self.large_linear and tokens >= LEAST_TOKENS:
                # The library adds in the product's own type, float32: one rounding less.
                x.settle().addmm_(term, weight.tensor.t())
                return x
        return _add_pending(x, self.all_reduce(self.linear(term, weight, batch)))

    def rms_norm(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        """See `headstock_triton.norm.add_norm`, here without a term."""
        return add_norm(x.contiguous(), None, weight.tensor, eps)

    def linear(self, x: Tensor, weight: Weight, batch: Batch | None) -> Tensor:
        """x W^T + b.   x: [tokens, in]    weight: [out, in]    returns: [tokens, out]"""
        if 0 < len(x) <= self.small_linear and x.dtype.itemsize == 2:
            return small_linear(x, weight.tensor, weight.bias, pdl=self.overlaps(x))
        return super().linear(x, weight, batch)

    def embed(self, batch: Batch) -> Stream:
        """The stream at the batch's tokens, and its first layer's norm."""
        weight = self.params[f"{self.config.layers[0].prefix}attn_norm"].tensor
        total, normed = embed_norm(
            batch.tokens,
            self.params["embed"].tensor,
            weight,
            self.config.norm_eps,
            pdl=self.overlaps(batch.tokens),
        )
        return Stream(total, None, normed)

    def qkv_rope_store(self, x: Stream, layer: LayerConfig, batch: Batch) -> Tensor:
        """Queries of the layer.

        returns: [tokens, heads, head_dim]
        writes: batch.pools[layer.index]
        """
        qkv = self.multiply_normed(
            x,
            self.params[f"{layer.prefix}attn_norm"],
            self.params[f"{layer.prefix}qkv"],
            self.config.norm_eps,
            batch,
        )
        return rope_and_store_kv(
            qkv,
            self.params[f"{layer.prefix}qk_norm"].tensor
            if self.config.qk_norm is QkNorm.HEAD
            else None,
            self.params[f"rope.{layer.rope}"].tensor,
            batch.positions,
            batch.slots[layer.group],
            batch.pools[layer.index],
            heads=self.config.heads,
            eps=self.config.norm_eps,
            pdl=self.overlaps(qkv),
        )

    def attn_out(
        self,
        x: Stream,
        attention: Tensor,
        layer: LayerConfig,
        batch: Batch,
    ) -> Stream:
        """The stream with the projected attention pending.

        attention: [tokens, heads, head_dim]
        writes: x
        """
        weight = self.params[f"{layer.prefix}attn_out"]
        return self.add_product(x, attention.flatten(1), weight, batch)

    def short_conv(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        """The stream with the layer's gated convolution pending.

        writes: x; the states of the batch's rows
        """
        assert layer.conv is not None
        prefix, weight = layer.prefix, self.params[f"{layer.prefix}conv"]
        # Before the product, which may add the pending term to `x`.
        inputs = find_conv_inputs(x, layer, layer.conv.taps, batch)
        projected = self.multiply_normed(
            x,
            self.params[f"{prefix}attn_norm"],
            self.params[f"{prefix}conv_in"],
            self.config.norm_eps,
            batch,
        )
        inner = convolve_gated_(
            projected,
            weight.tensor,
            weight.bias,
            batch.kv[layer.index].state["conv"],
            inputs,
            pdl=self.overlaps(projected),
        )
        return self.add_product(x, inner, self.params[f"{prefix}conv_out"], batch)

    def mlp(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        """The stream with the layer's feed-forward part pending.   writes: x"""
        inner = self.multiply_normed(
            x,
            self.params[f"{layer.prefix}mlp_norm"],
            self.params[f"{layer.prefix}gate_up"],
            self.config.norm_eps,
            batch,
            gated=True,
        )
        return self.add_product(x, inner, self.params[f"{layer.prefix}down"], batch)

    def moe(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        """The stream with the layer's mixture of experts pending.   writes: x"""
        assert layer.experts is not None
        pdl = self.overlaps(x.total)
        normed = _normalize(
            x, self.params[f"{layer.prefix}mlp_norm"], self.config.norm_eps, pdl=pdl
        )
        scores = self.linear(normed, self.params[f"{layer.prefix}router"], batch)
        gate_up, down = (
            self.params[f"{layer.prefix}experts_gate_up"],
            self.params[f"{layer.prefix}experts_down"],
        )
        if self.fused_experts and normed.dtype.itemsize == 2:
            # Padding gets no expert: otherwise each padding row of a graph would read the weights
            # of a row's experts.
            slots, page_size = batch.slots[layer.group], batch.kv[layer.index].page_slots
            mixed = fused_mix_experts(
                normed,
                scores,
                layer.experts,
                gate_up.tensor,
                down.tensor,
                slots=slots,
                page_size=page_size,
                tables=self.expert_tiles,
                pdl=pdl,
            )
        else:
            weights, ids = self.route(scores, layer.experts, None)
            mixed = self.mix_experts(
                normed, weights, ids, gate_up, down, self.config.activation, batch
            )
        return _add_pending(x, self.all_reduce(mixed))

    def final_norm(self, x: Stream, batch: Batch) -> Tensor:
        """The normalized hidden states.   returns: [tokens, hidden]"""
        return _normalize(x, self.params["norm"], self.config.norm_eps, pdl=self.overlaps(x.total))

    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        """See `headstock_triton.sampling.sampler.fused_sample`."""
        return fused_sample(logits, sampling, pdl=self.overlaps(logits))

    def lm_head_sample(self, hidden: Tensor, sampling: Sampling) -> Sample:
        """Tokens sampled from the scores of `hidden` [n, hidden], in the type of the product."""
        head = self.params["embed" if self.config.tied_embeddings else "lm_head"]
        # No copy in float32: the kernels widen their inputs.
        logits = self.linear(hidden, head, None)
        if self.config.shard.count > 1:
            logits = self.all_gather(logits)[:, : self.config.full_vocab].contiguous()
        return fused_sample(logits, sampling, pdl=self.overlaps(logits))
