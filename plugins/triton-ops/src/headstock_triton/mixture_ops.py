"""What fused operations take, and the part of them that mixes experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headstock.ops.torch_ops import TorchOps
from headstock.spi import (
    Activation,
    Batch,
    ClampedGate,
    DeviceEnv,
    LayerConfig,
    ModelConfig,
    PartQuery,
    Weight,
    find_variants,
)
from headstock_triton.delta_rule import can_apply
from headstock_triton.experts import mix_chosen_experts
from headstock_triton.fused import FUSED
from headstock_triton.options import TritonOptions
from headstock_triton.tiles import read_tables
from headstock_triton.tune_experts import tune_experts


class MixtureOps(TorchOps):
    """`TorchOps` whose experts are multiplied by kernels, however they are chosen."""

    def __init__(self, options: TritonOptions) -> None:
        self.fused_experts = options.fused_experts
        self.fused_delta = options.delta_rule
        self.chosen_experts = options.fused_experts and options.chosen_experts
        self.expert_tiles = read_tables(options.expert_tiles)

    def takes(self, operation: str, config: ModelConfig, layer: LayerConfig | None) -> bool:
        """Whether a kernel supports all variants of the operation in this configuration."""
        if operation == "delta_rule" and not self.applies_delta(layer):
            return False
        return operation in FUSED and find_variants(operation, config, layer) <= FUSED[operation]

    def applies_delta(self, layer: LayerConfig | None) -> bool:
        """Whether kernels compute the layer's delta rule."""
        delta = None if layer is None else layer.delta
        return self.fused_delta and delta is not None and can_apply(delta)

    def multiplies_experts(self, model: ModelConfig) -> bool:
        """Whether kernels multiply the experts of all layers."""
        mixtures = (layer for layer in model.layers if layer.experts is not None)
        return self.chosen_experts or (
            self.fused_experts and all(self.takes("moe", model, layer) for layer in mixtures)
        )

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

    def mix_experts(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        gate_up: Weight,
        down: Weight,
        activation: Activation | ClampedGate,
        batch: Batch,
    ) -> Tensor:
        """See `FineTierOps.mix_experts`; in float32 as `torch` does."""
        if not self.chosen_experts or x.dtype.itemsize != 2:
            return super().mix_experts(x, weights, ids, gate_up, down, activation, batch)
        slots, page_size = self.find_padding(batch)
        return mix_chosen_experts(
            x,
            weights,
            ids,
            gate_up,
            down,
            activation,
            slots=slots,
            page_size=page_size,
            tables=self.expert_tiles,
        )

    def find_padding(self, batch: Batch) -> tuple[Tensor | None, int]:
        """The slots of the batch's tokens, and below which of them tokens are padding."""
        # Padding gets no expert: otherwise each padding row of a graph would read the weights of
        # its experts.
        for layer in self.config.layers:
            if layer.state is None:
                return batch.slots[layer.group], batch.kv[layer.index].page_slots
        return None, 0
