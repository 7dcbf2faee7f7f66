"""The operations of a decoder, each a product and one fused kernel before or after it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headstock.nn.moe import number_own_experts
from headstock.nn.vocab_shard import find_own_tokens, gather_mask, needs_whole_rows
from headstock.ops.fine_tier import find_conv_inputs
from headstock.spi import (
    ALONE,
    Activation,
    Batch,
    ClampedGate,
    Collectives,
    LayerConfig,
    ModelConfig,
    Params,
    QkNorm,
    Sample,
    Sampling,
    Stream,
    Weight,
)
from headstock_triton.activation import fused_silu_and_mul, quantize_silu_and_mul
from headstock_triton.conv import convolve_gated_, convolve_silu_
from headstock_triton.delta_rule import DeltaInputs, apply_delta_rule_, find_delta_steps
from headstock_triton.experts import mix_experts
from headstock_triton.few_linear import MOST_WIDE_OUTS, count_tiles, is_few, multiply_few
from headstock_triton.fp8_rows import Fp8Rows, RowForm, quantize_rows
from headstock_triton.gate import multiply_gate
from headstock_triton.gated_linear import LEAST_TOKENS
from headstock_triton.heads import rope_and_store_kv
from headstock_triton.linear import can_add, can_fuse, small_linear
from headstock_triton.mixture_ops import MixtureOps
from headstock_triton.norm import add_norm, embed_norm, quantize_norm
from headstock_triton.options import MOST_TOKENS, TritonOptions
from headstock_triton.packed import (
    choose_form,
    has_fused,
    is_by_row,
    is_quantized,
    multiply_fused,
    multiply_left,
    multiply_packed,
    multiply_quantized,
)
from headstock_triton.pdl import has_pdl
from headstock_triton.ranks.push import PushCollectives, connect_by_push
from headstock_triton.sampling.sampler import fused_sample
from headstock_triton.sampling.shard import fused_sample_shard


class TritonOps(MixtureOps):
    """`TorchOps` with all operations between matrix products fused; options replace products
    too."""

    def __init__(self, options: TritonOptions | None = None) -> None:
        options = options or TritonOptions()
        super().__init__(options)
        self.small_linear = options.small_linear
        self.fused_linear = options.fused_linear
        self.split_linear = options.split_linear
        self.few_option, self.few_linear = options.few_linear, options.few_linear == "on"
        self.large_linear = options.large_linear
        self.push_bytes = options.push_bytes
        self.pdl = options.pdl

    def bind(self, params: Params, config: ModelConfig, collectives: Collectives = ALONE) -> None:
        """See `Ops.bind`."""
        super().bind(params, config, connect_by_push(collectives, self.push_bytes))
        if self.few_option == "auto":
            self.few_linear = collectives.count > 1
        device = next((weight.tensor.device for weight in params.values()), None)
        self.counters = torch.zeros(count_tiles(MOST_WIDE_OUTS), dtype=torch.int32, device=device)

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

    def normalize(self, x: Stream, weight: Weight) -> Tensor:
        """The normalized stream, in one kernel with the addition of the pending term.

        returns: [tokens, hidden]
        writes: x, which then has nothing pending
        """
        normed, eps, ranks = x.normed, self.config.norm_eps, x.sum_over
        if normed is None:
            pending, pdl = x.pending, self.overlaps(x.total)
            if pending is None or ranks.count == 1:
                normed = add_norm(x.total, pending, weight.tensor, eps, pdl=pdl)
            elif isinstance(ranks, PushCollectives) and ranks.can_add_norm(x.total):
                normed = ranks.add_norm(x.total, pending, weight.tensor, eps)
            else:
                normed = add_norm(x.settle(), None, weight.tensor, eps, pdl=pdl)
        x.pending, x.normed, x.sum_over = None, None, ALONE
        return normed

    def multiply_normed(
        self,
        x: Stream,
        norm: Weight,
        weight: Weight,
        batch: Batch,
        *,
        gated: bool = False,
    ) -> Tensor:
        """The normalized stream times the weight; `gated`: with the activation.

        returns: [tokens, out], or half of it
        """
        pdl, is_fused = self.overlaps(x.total), self.is_fused(x) and has_fused(x.total, weight)
        if is_fused and x.pending is None:
            x.normed = None
            eps = self.config.norm_eps
            return multiply_fused(x.total, weight, norm=norm.tensor, eps=eps, gated=gated, pdl=pdl)
        if not is_fused and is_quantized(x.total, weight):
            form = choose_form(x.total, weight)
            product = multiply_quantized(self.quantize_normed(x, norm, form), weight)
            return fused_silu_and_mul(product, pdl=pdl) if gated else product
        # A term that pends, as one that is to be summed over ranks, is added by a separate norm.
        normed = self.normalize(x, norm)
        if is_fused:
            return multiply_fused(normed, weight, gated=gated, pdl=pdl)
        if not gated:
            return self.linear(normed, weight, batch)
        most, large = self.split_linear, self.large_linear
        inner = multiply_gate(normed, weight, most_split=most, large=large, pdl=pdl)
        if inner is not None:
            return inner
        return fused_silu_and_mul(self.linear(normed, weight, batch), pdl=pdl)

    def multiply_each(self, x: Tensor, weights: Sequence[Weight], batch: Batch) -> list[Tensor]:
        """The products of the same tokens with several weights.   x: [tokens, in]"""
        rows: dict[RowForm, Fp8Rows] = {}
        products = []
        for weight in weights:
            if not is_quantized(x, weight):
                products.append(self.linear(x, weight, batch))
                continue
            form = choose_form(x, weight)
            if form not in rows:
                rows[form] = quantize_rows(x, form)
            products.append(multiply_quantized(rows[form], weight))
        return products

    def quantize_normed(self, x: Stream, weight: Weight, form: RowForm) -> Fp8Rows:
        """The normalized stream in FP8.   writes: x, which then has nothing pending"""
        eps = self.config.norm_eps
        if x.normed is not None or x.sum_over.count > 1:
            return quantize_rows(self.normalize(x, weight), form)
        rows = quantize_norm(x.total, x.pending, weight.tensor, eps, form)
        x.pending = None
        return rows

    def add_product(self, x: Stream, term: Tensor, weight: Weight, batch: Batch) -> Stream:
        """The stream with `term` times the weight, added or pending.   writes: x"""
        # A term that is to be summed over ranks cannot be added where it is computed.
        can_add_here = self.collectives.count == 1
        is_fused = self.is_fused(x) and has_fused(term, weight)
        if can_add_here and is_fused and can_add(len(term), term.shape[1], term.device):
            x.settle()
            multiply_fused(term, weight, total=x.total, pdl=self.overlaps(term))
            return x
        is_packed = weight.format is not None
        if weight.bias is None and term.dtype.itemsize == 2:
            left = multiply_left(term, weight, self.split_linear, pdl=self.overlaps(term))
            if left is not None:
                return self.add_later(x, left)
            if can_add_here and not is_packed and self.large_linear and len(term) >= LEAST_TOKENS:
                # The library adds in the product's own type, float32: one rounding less.
                x.settle().addmm_(term, weight.tensor.t())
                return x
        return self.add_later(x, self.linear(term, weight, batch))

    def add_later(self, x: Stream, term: Tensor) -> Stream:
        """The stream with this rank's part of a term pending.   writes: x, which is the result"""
        x.settle()
        x.pending, x.sum_over = term, self.collectives
        return x

    def rms_norm(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        """See `headstock_triton.norm.add_norm`, here without a term."""
        return add_norm(x.contiguous(), None, weight.tensor, eps)

    def linear(self, x: Tensor, weight: Weight, batch: Batch | None) -> Tensor:
        """x W^T + b.   x: [tokens, in]    weight: [out, in]    returns: [tokens, out]"""
        if weight.format is not None:
            return multiply_packed(x, weight, pdl=self.overlaps(x))
        tokens, width = x.shape
        is_small = 0 < tokens <= self.small_linear and x.dtype.itemsize == 2
        if is_small and can_add(tokens, width, x.device):
            return small_linear(x, weight, pdl=self.overlaps(x))
        if self.few_linear and is_few(x, len(weight.tensor)):
            return multiply_few(x, weight, self.counters, pdl=self.overlaps(x))
        return super().linear(x, weight, batch)

    def activate_and_mul(
        self, gate_up: Tensor, activation: Activation | ClampedGate = Activation.SILU
    ) -> Tensor:
        """The activation of the first half, times the second half; SiLU in one kernel.

        gate_up: [tokens, 2 * n]    returns: [tokens, n]
        """
        if activation is Activation.SILU and gate_up.dim() == 2 and gate_up.is_contiguous():
            return fused_silu_and_mul(gate_up, pdl=self.overlaps(gate_up))
        return super().activate_and_mul(gate_up, activation)

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
        return Stream(total, normed=normed)

    def qkv_rope_store(self, x: Stream, layer: LayerConfig, batch: Batch) -> Tensor:
        """Queries of the layer.

        returns: [tokens, heads, head_dim]
        writes: batch.pools[layer.index]
        """
        qkv = self.multiply_normed(
            x,
            self.params[f"{layer.prefix}attn_norm"],
            self.params[f"{layer.prefix}qkv"],
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
            heads=self.config.sizes_of(layer).heads,
            eps=self.config.norm_eps,
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
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

    def delta_rule(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        """The stream with the layer's gated delta rule pending.

        writes: x; the states of the batch's rows
        """
        delta, prefix, params = layer.delta, layer.prefix, self.params
        assert delta is not None
        pdl, state = self.overlaps(x.total), batch.kv[layer.index].state
        conv = find_conv_inputs(x, layer, delta.taps, batch)
        steps = find_delta_steps(x, batch, pdl=pdl)
        weights = [params[f"{prefix}{name}"] for name in ("delta_in", "delta_gate", "delta_gates")]
        normed = self.normalize(x, params[f"{prefix}attn_norm"])
        mixed, outer_gate, gates = self.multiply_each(normed, weights, batch)
        weight = params[f"{prefix}conv"]
        inputs = DeltaInputs(
            mixed=convolve_silu_(mixed, weight.tensor, weight.bias, state["conv"], conv, pdl=pdl),
            gates=gates,
            outer_gate=outer_gate,
            rates=params[f"{prefix}delta_rate"].tensor,
            biases=params[f"{prefix}delta_bias"].tensor,
            weight=params[f"{prefix}delta_norm"].tensor,
            eps=self.config.norm_eps,
        )
        read = apply_delta_rule_(
            inputs, delta, state["delta"], conv.pages, steps, conv.saved, pdl=pdl
        )
        return self.add_product(x, read, params[f"{prefix}delta_out"], batch)

    def mlp(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        """The stream with the layer's feed-forward part pending.   writes: x"""
        prefix = layer.prefix
        gate_up, down = self.params[f"{prefix}gate_up"], self.params[f"{prefix}down"]
        norm = self.params[f"{prefix}mlp_norm"]
        is_fused = self.is_fused(x) and is_by_row(gate_up)
        if not is_fused and is_quantized(x.total, gate_up) and is_quantized(x.total, down):
            normed = self.quantize_normed(x, norm, choose_form(x.total, gate_up))
            product = multiply_quantized(normed, gate_up)
            rows = quantize_silu_and_mul(product, choose_form(product, down))
            return self.add_later(x, multiply_quantized(rows, down, left=down.bias is None))
        inner = self.multiply_normed(x, norm, gate_up, batch, gated=True)
        return self.add_product(x, inner, down, batch)

    def moe(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        """The stream with the layer's mixture of experts pending.   writes: x"""
        assert layer.experts is not None
        pdl = self.overlaps(x.total)
        normed = self.normalize(x, self.params[f"{layer.prefix}mlp_norm"])
        scores = self.linear(normed, self.params[f"{layer.prefix}router"], batch)
        gate_up, down = (
            self.params[f"{layer.prefix}experts_gate_up"],
            self.params[f"{layer.prefix}experts_down"],
        )
        if self.fused_experts and normed.dtype.itemsize == 2:
            # Padding gets no expert: otherwise each padding row of a graph would read the weights
            # of a row's experts.
            slots, page_size = batch.slots[layer.group], batch.kv[layer.index].page_slots
            mixed = mix_experts(
                normed,
                scores,
                layer.experts,
                gate_up,
                down,
                slots=slots,
                page_size=page_size,
                tables=self.expert_tiles,
                pdl=pdl,
            )
        else:
            weights, ids = self.route(scores, layer.experts, None)
            ids = number_own_experts(ids, layer.experts)
            gate = layer.experts.gate or self.config.activation
            mixed = self.mix_experts(normed, weights, ids, gate_up, down, gate, batch)
        return self.add_later(x, mixed)

    def final_norm(self, x: Stream, batch: Batch) -> Tensor:
        """The normalized hidden states.   returns: [tokens, hidden]"""
        return self.normalize(x, self.params["norm"])

    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        """See `headstock_triton.sampling.sampler.fused_sample`."""
        return fused_sample(logits, sampling, pdl=self.overlaps(logits))

    def sample_shard(self, logits: Tensor, sampling: Sampling) -> Sample:
        """See `headstock_triton.sampling.shard.fused_sample_shard`."""
        own, pdl = find_own_tokens(self.config), self.overlaps(logits)
        return fused_sample_shard(logits, sampling, own, self.all_gather, pdl=pdl)

    def lm_head_sample(self, hidden: Tensor, sampling: Sampling) -> Sample:
        """Tokens sampled from the scores of `hidden` [n, hidden], in the type of the product."""
        head = self.params["embed" if self.config.tied_embeddings else "lm_head"]
        # No copy in float32: the kernels widen their inputs.
        logits = self.linear(hidden, head, None)
        if self.config.shard.count > 1:
            if not needs_whole_rows(sampling):
                return self.sample_shard(logits, sampling)
            logits = self.all_gather(logits)[:, : self.config.full_vocab].contiguous()
            sampling = gather_mask(sampling, self.config, self.all_gather)
        return fused_sample(logits, sampling, pdl=self.overlaps(logits))
