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
    ParamSpec,
    PartQuery,
    Role,
    Weight,
    WeightFormat,
    find_variants,
)
from headstock_triton.delta_rule import can_apply
from headstock_triton.experts import mix_chosen_experts
from headstock_triton.fused import FUSED
from headstock_triton.options import TritonOptions
from headstock_triton.packed import (
    can_keep,
    can_mix,
    can_multiply,
    is_faster,
    prepare_experts,
    prepare_map,
)
from headstock_triton.tiles import read_tables
from headstock_triton.tune_experts import tune_experts


class MixtureOps(TorchOps):
    """`TorchOps` whose experts are multiplied by kernels, however they are chosen."""

    def __init__(self, options: TritonOptions) -> None:
        self.fused_experts = options.fused_experts
        self.fused_delta = options.delta_rule
        self.chosen_experts = options.fused_experts and options.chosen_experts
        self.expert_tiles = read_tables(options.expert_tiles)
        self.packed, self.word_tokens = options.packed, options.word_tokens
        self.keeps_packed = self.keeps_experts = False
        self.dtype = torch.float32

    def configure(self, query: PartQuery, env: DeviceEnv) -> None:
        """See `Ops.configure`."""
        self.keeps_packed = can_keep(self.packed, query, env)
        self.dtype = getattr(torch, query.dtype)
        self.keeps_experts = self.multiplies_experts(query.model)
        # In float32 the chunks' kernels take more shared memory than some GPUs have.
        self.fused_delta = self.fused_delta and self.dtype.itemsize == 2

    def takes_format(self, spec: ParamSpec, format: WeightFormat) -> bool:
        """Yes for linear maps and experts in 8 and 4 bits, where kernels use all of them; by
        default for those that are faster.
        """
        can_use = can_multiply(spec, format)
        if Role.EXPERTS in spec.roles:
            can_use = self.keeps_experts and can_mix(spec, format, self.dtype)
        # What no kernel takes, as biases, may have any number of dimensions.
        return self.keeps_packed and can_use and (self.packed == "on" or is_faster(spec, format))

    def prepare(self, spec: ParamSpec, weight: Weight) -> Weight:
        """The weight as it is; a packed one as kernels read it."""
        if weight.format is None:
            return weight
        is_mixed = Role.EXPERTS in spec.roles
        if is_mixed:
            return prepare_experts(weight)
        return prepare_map(weight, self.dtype, word_tokens=self.word_tokens)

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
