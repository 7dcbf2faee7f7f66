"""Sets of operations that are each wrong in one way."""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from headstock.nn.sampler import sample
from headstock.ops.fine_tier import FineTierOps
from headstock.ops.torch_ops import TorchOps
from headstock.spi import Batch, LayerConfig, ModelConfig, Sample, Sampling, Stream, Weight

VOCAB = 768


class PreparesTensor(TorchOps):
    def prepare(self, spec: Any, weight: Weight) -> Any:
        return weight.tensor


class CannotPrepare(TorchOps):
    def prepare(self, spec: Any, weight: Weight) -> Weight:
        return evolve(weight, tensor=weight.tensor.view(3, -1, 5))


class TakesNothing(TorchOps):
    def mlp(self, *arguments: Any) -> Stream:
        return super().mlp(*arguments)


class WrongEps(TorchOps):
    def rms_norm(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        return super().rms_norm(x, weight, 0.5)


class SlotOff(TorchOps):
    def store_kv_(self, pool: Tensor, cells: Tensor, kv: Tensor) -> None:
        super().store_kv_(pool, (cells + 1).clamp(max=pool.shape[0] * 2 * pool.shape[2] - 1), kv)


class KeysForValues(TorchOps):
    def store_kv_(self, pool: Tensor, cells: Tensor, kv: Tensor) -> None:
        super().store_kv_(pool, cells, kv.flip(1))


class OtherLayer(TorchOps):
    def takes(self, operation: str, config: ModelConfig, layer: LayerConfig | None) -> bool:
        return operation == "qkv_rope_store"

    def qkv_rope_store(self, x: Stream, layer: LayerConfig, batch: Batch) -> Tensor:
        other = evolve(batch, pools=batch.pools[1:] + batch.pools[:1])
        return FineTierOps.qkv_rope_store(self, x, layer, other)


class MovesPositions(TorchOps):
    def rotate_(self, x: Tensor, cos_sin: Any, out: Tensor) -> None:
        late = evolve(cos_sin, cos=cos_sin.cos.roll(1, 0), sin=cos_sin.sin.roll(1, 0))
        super().rotate_(x, late, out)


class WritesPositions(TorchOps):
    def takes(self, operation: str, config: ModelConfig, layer: LayerConfig | None) -> bool:
        return operation == "final_norm"

    def final_norm(self, x: Stream, batch: Batch) -> Tensor:
        batch.positions.add_(1)
        return FineTierOps.final_norm(self, x, batch)


class ForgetsResidual(TorchOps):
    def takes(self, operation: str, config: ModelConfig, layer: LayerConfig | None) -> bool:
        return operation == "mlp" and layer is not None and layer.index == 3

    def mlp(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        before = x.settle().clone()
        y = FineTierOps.mlp(self, x, layer, batch)
        return Stream(y.settle() - before)


class ReturnsTensor(ForgetsResidual):
    def mlp(self, x: Stream, layer: LayerConfig, batch: Batch) -> Any:
        return FineTierOps.mlp(self, x, layer, batch).settle()


class Overflows(TorchOps):
    def activate_and_mul(self, gate_up: Tensor, activation: Any) -> Tensor:
        return super().activate_and_mul(gate_up, activation) * torch.inf


class NegativeToken(TorchOps):
    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        sampled = sample(logits, sampling)
        return evolve(sampled, tokens=torch.full_like(sampled.tokens, -1))


class UnknownToken(TorchOps):
    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        sampled = sample(logits, sampling)
        return evolve(sampled, tokens=sampled.tokens + VOCAB)


class SecondBest(TorchOps):
    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        sampled = sample(logits, sampling)
        return evolve(sampled, tokens=logits.topk(2, -1).indices[:, 1])


class HealthyOverNan(TorchOps):
    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        sampled = sample(logits * torch.nan, sampling)
        return evolve(sampled, healthy=torch.ones_like(sampled.healthy))


class CallsAllHealthy(Overflows):
    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        sampled = sample(logits, sampling)
        return evolve(sampled, healthy=torch.ones_like(sampled.healthy))


class WritesOtherPages(TorchOps):
    def store_kv_(self, pool: Tensor, cells: Tensor, kv: Tensor) -> None:
        super().store_kv_(pool, cells, kv)
        # Cells alternate between keys and values of a page's slots.
        own = (cells // (2 * pool.shape[2])).flatten().tolist()
        for page in {1, 2, 3, 4, 5, 6, 7, 8}.difference(own):
            pool[page] = 0.5


class OtherNoise(TorchOps):
    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        if sampling.seeds is None:
            return sample(logits, sampling)
        return sample(logits, evolve(sampling, seeds=sampling.seeds + 1))


class OtherLogprobs(TorchOps):
    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        sampled = sample(logits, sampling)
        return evolve(sampled, logprobs=None if sampled.logprobs is None else sampled.logprobs - 1)
