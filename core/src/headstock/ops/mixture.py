"""A layer's mixture of experts, alone or beside a dense feed-forward part."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from headstock.nn.moe import number_own_experts
from headstock.spi import (
    Activation,
    Batch,
    ClampedGate,
    Experts,
    LayerConfig,
    ModelConfig,
    Params,
    Weight,
)


class _FineOps(Protocol):
    """The operations that are used here, and what they are bound to."""

    params: Params
    config: ModelConfig

    def rms_norm(self, x: Tensor, weight: Weight, eps: float) -> Tensor: ...
    def linear(self, x: Tensor, weight: Weight, batch: Batch | None) -> Tensor: ...
    def activate_and_mul(self, gate_up: Tensor, activation: Activation) -> Tensor: ...
    def route(
        self, scores: Tensor, experts: Experts, bias: Weight | None
    ) -> tuple[Tensor, Tensor]: ...
    def mix_experts(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        gate_up: Weight,
        down: Weight,
        activation: Activation | ClampedGate,
        batch: Batch,
    ) -> Tensor: ...
    def all_reduce(self, x: Tensor) -> Tensor: ...


def run_mixture(ops: _FineOps, x: Tensor, layer: LayerConfig, batch: Batch) -> Tensor:
    """What the layer's experts make of `x`, and what the one makes that every token uses.

    x, result: [tokens, hidden]
    """
    assert layer.experts is not None
    out = _run_experts(ops, x, x, layer, layer.experts, batch)
    if not layer.experts.shared:
        return out
    prefix, params = layer.prefix, ops.params
    shared = _run_mlp(ops, x, f"{prefix}shared_gate_up", f"{prefix}shared_down", batch)
    if layer.experts.shared_gate:
        shared = shared * ops.linear(x, params[f"{prefix}shared_gate"], batch).sigmoid()
    return out.add_(shared)


def run_beside_mlp(ops: _FineOps, x: Tensor, layer: LayerConfig, batch: Batch) -> Tensor:
    """What the layer's experts and its dense part make of the stream, summed over the ranks.

    x, result: [tokens, hidden]
    """
    assert layer.experts is not None
    params, prefix, eps = ops.params, layer.prefix, ops.config.norm_eps

    def normalize(states: Tensor, name: str) -> Tensor:
        return ops.rms_norm(states, params[f"{prefix}{name}"], eps)

    dense = _run_mlp(ops, normalize(x, "mlp_norm"), f"{prefix}gate_up", f"{prefix}down", batch)
    # Ranks sum before the norms, which take whole numbers.
    dense = normalize(ops.all_reduce(dense), "dense_post_norm")
    given, routed = normalize(x, "experts_norm"), normalize(x, "router_norm")
    mixed = _run_experts(ops, given, routed, layer, layer.experts, batch)
    return dense.add_(normalize(ops.all_reduce(mixed), "experts_post_norm"))


def _run_mlp(ops: _FineOps, x: Tensor, gate_up: str, down: str, batch: Batch) -> Tensor:
    """What a feed-forward part with these parameters makes of `x` [tokens, hidden]."""
    product = ops.linear(x, ops.params[gate_up], batch)
    inner = ops.activate_and_mul(product, ops.config.activation)
    return ops.linear(inner, ops.params[down], batch)


def _run_experts(
    ops: _FineOps, x: Tensor, routed: Tensor, layer: LayerConfig, experts: Experts, batch: Batch
) -> Tensor:
    """What the experts that are chosen by `routed` make of `x`, both [tokens, hidden]."""
    prefix, params = layer.prefix, ops.params
    if experts.wide_scores:
        # The map's weights are in float32 then, too.
        routed = routed.float()
    scores = ops.linear(routed, params[f"{prefix}router"], batch)
    weights, ids = ops.route(scores, experts, params.get(f"{prefix}router_bias"))
    if experts.has_scales:
        weights = weights * params[f"{prefix}expert_scales"].tensor[ids]
    return ops.mix_experts(
        x,
        weights.to(x.dtype),
        number_own_experts(ids, experts),
        params[f"{prefix}experts_gate_up"],
        params[f"{prefix}experts_down"],
        experts.gate or ops.config.activation,
        batch,
    )
