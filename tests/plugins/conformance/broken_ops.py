"""Sets of operations that are wrong in one way each."""

from __future__ import annotations

import torch
from attrs import evolve
from torch import Tensor

from headstock.ops.torch_ops import TorchOps
from headstock.spi import (
    Batch,
    DeviceEnv,
    LayerConfig,
    ModelConfig,
    ParamSpec,
    PartQuery,
    Role,
    Sample,
    Sampling,
    Stream,
    Weight,
    WeightFormat,
    WeightKind,
)


class OwnEps(TorchOps):
    """Takes the eps that most models have."""

    def rms_norm(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        return super().rms_norm(x, weight, 1e-6)


class KVMisplaced(TorchOps):
    """Stores keys and values one cell further."""

    def store_kv_(self, pool: Tensor, cells: Tensor, kv: Tensor) -> None:
        flat = pool.flatten(0, 2)
        super().store_kv_(pool, (cells + 1) % len(flat), kv)


class ScalesTurned(TorchOps):
    """Keeps maps in 8 bits, and multiplies rows by the scales of others."""

    def takes_format(self, spec: ParamSpec, format: WeightFormat) -> bool:
        return format.kind is WeightKind.FP8_E4M3 and spec.roles == {Role.LINEAR}

    def prepare(self, spec: ParamSpec, weight: Weight) -> Weight:
        if weight.format is None:
            return weight
        assert weight.scales is not None
        plain = weight.tensor.float() * weight.scales.flip(0)
        return Weight(tensor=plain.to(torch.bfloat16), bias=weight.bias)


class KVSwapped(TorchOps):
    """Stores values where keys belong."""

    def store_kv_(self, pool: Tensor, cells: Tensor, kv: Tensor) -> None:
        super().store_kv_(pool, cells, kv.flip(1))


class StartsWritten(TorchOps):
    """Counts the first positions up in place."""

    def linear(self, x: Tensor, weight: Weight, batch: Batch | None) -> Tensor:
        if batch is not None:
            batch.starts.add_(1)
        return super().linear(x, weight, batch)


class FewBits(TorchOps):
    """Keeps the weights of linear maps as so many steps to either side of 0."""

    steps = 127

    def prepare(self, spec: ParamSpec, weight: Weight) -> Weight:
        if Role.LINEAR not in spec.roles:
            return weight
        scale = weight.tensor.abs().amax(-1, keepdim=True).clamp(min=1e-12) / self.steps
        return evolve(weight, tensor=(weight.tensor / scale).round() * scale)


class TwoBits(FewBits):
    steps = 1


class BiasForgotten(TorchOps):
    """Has products without their biases."""

    def linear(self, x: Tensor, weight: Weight, batch: Batch | None) -> Tensor:
        return super().linear(x, evolve(weight, bias=None), batch)


class GreedyAlone(TorchOps):
    """Samples the best token whatever is asked."""

    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        return super().sample(logits, Sampling())


class SettingsIgnored(TorchOps):
    """Samples as if some settings were not there."""

    names: tuple[str, ...] = ()

    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        return super().sample(logits, evolve(sampling, **dict.fromkeys(self.names)))


class MaskIgnored(SettingsIgnored):
    names = ("mask",)


class ProcessorsIgnored(SettingsIgnored):
    names = ("processing",)


class BansIgnored(SettingsIgnored):
    names = ("banned",)


class PenaltiesIgnored(SettingsIgnored):
    names = ("repetition", "presence", "frequency")


class TargetsIgnored(SettingsIgnored):
    names = ("targets",)


class TopKIgnored(SettingsIgnored):
    names = ("top_k",)


class TopPIgnored(SettingsIgnored):
    names = ("top_p",)


class MinPIgnored(SettingsIgnored):
    names = ("min_p",)


class RepetitionIgnored(SettingsIgnored):
    names = ("repetition",)


class PresenceIgnored(SettingsIgnored):
    names = ("presence",)


class FrequencyIgnored(SettingsIgnored):
    names = ("frequency",)


class BiasIgnored(SettingsIgnored):
    names = ("bias",)


class HeadMinPIgnored(TorchOps):
    """Ignores min-p where scores and samples are one call."""

    def lm_head_sample(self, hidden: Tensor, sampling: Sampling) -> Sample:
        return super().lm_head_sample(hidden, evolve(sampling, min_p=None))


class OneSeed(TorchOps):
    """Takes the seed of the first row for all."""

    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        if sampling.seeds is not None:
            sampling = evolve(sampling, seeds=sampling.seeds[:1].expand(len(logits)))
        return super().sample(logits, sampling)


class OnePosition(TorchOps):
    """Takes the position of the first row for all."""

    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        if sampling.positions is not None:
            sampling = evolve(sampling, positions=sampling.positions[:1].expand(len(logits)))
        return super().sample(logits, sampling)


class SampleRowsCut(TorchOps):
    """Samples the first 50 rows."""

    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        logits[50:] = logits[:1]
        return super().sample(logits, sampling)


class AlternativesCut(TorchOps):
    """Has log-probabilities of five alternatives."""

    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        sample = super().sample(logits, sampling)
        if sample.top_logprobs is not None:
            sample.top_logprobs[:, 5:] = 0
        return sample


class VocabularyCut(TorchOps):
    """Samples the first 65,536 tokens alone."""

    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        logits[:, 1 << 16 :] = float("-inf")
        return super().sample(logits, sampling)


class HistoryCut(TorchOps):
    """Counts the first 100 tokens of a row."""

    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        if sampling.history_lens is not None:
            lens = sampling.history_lens.clamp(max=100)
            sampling = evolve(sampling, history_lens=lens)
        return super().sample(logits, sampling)


class LiftForgotten(TorchOps):
    """Takes penalties that lift tokens for none."""

    name, neutral = "", 0.0

    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        values = getattr(sampling, self.name)
        if values is not None:
            sampling = evolve(sampling, **{self.name: values.clamp(min=self.neutral)})
        return super().sample(logits, sampling)


class PresenceLiftForgotten(LiftForgotten):
    name = "presence"


class FrequencyLiftForgotten(LiftForgotten):
    name = "frequency"


class RepetitionLiftForgotten(LiftForgotten):
    name, neutral = "repetition", 1.0


class NormWeightsCut(TorchOps):
    """Bounds the weights of norms."""

    def rms_norm(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        return super().rms_norm(x, evolve(weight, tensor=weight.tensor.clamp(-8, 8)), eps)


class NormInputsCut(TorchOps):
    """Bounds what is normalized."""

    def rms_norm(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        return super().rms_norm(x.clamp(-1000, 1000), weight, eps)


class Configured(TorchOps):
    """Needs to know how many tokens there are before it serves."""

    vocab = 0

    def configure(self, query: PartQuery, env: DeviceEnv) -> None:
        self.vocab = query.model.vocab

    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        assert logits.shape[1] == self.vocab, f"made for {self.vocab} tokens"
        return super().sample(logits, sampling)


class ExpertsRefused(TorchOps):
    """Serves no mixtures of experts."""

    def configure(self, query: PartQuery, env: DeviceEnv) -> None:
        if any(layer.experts for layer in query.model.layers):
            raise ValueError("it has no experts")


class SampleCallsCounted(TorchOps):
    """Is greedy from the 400th call on."""

    calls = 0

    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        self.calls += 1
        return super().sample(logits, sampling if self.calls < 400 else Sampling())


class LinearTokensCut(TorchOps):
    """Has products of the first 900 tokens alone."""

    def linear(self, x: Tensor, weight: Weight, batch: Batch | None) -> Tensor:
        out = super().linear(x, weight, batch)
        out[900:] = 0
        return out


class TokensRead(TorchOps):
    """Looks at the step before it computes."""

    def rms_norm(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        if len(x) > 300 and float(x.abs().max()) == 0.0:
            return x
        return super().rms_norm(x, weight, eps)


class SequencesCut(TorchOps):
    """Stores keys and values of the first 200 rows alone."""

    def linear(self, x: Tensor, weight: Weight, batch: Batch | None) -> Tensor:
        out = super().linear(x, weight, batch)
        if batch is not None and len(batch.row_ids) > 200:
            out[int(batch.query_start[200]) :] = 0
        return out


class LateLayersForgotten(TorchOps):
    """Leaves out the feed-forward part from layer 23 on."""

    def takes(self, operation: str, config: ModelConfig, layer: LayerConfig | None) -> bool:
        return operation == "mlp" or super().takes(operation, config, layer)

    def mlp(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        return x if layer.index >= 23 else super().mlp(x, layer, batch)


class GateIgnored(TorchOps):
    """Multiplies attention by no gate."""

    def takes(self, operation: str, config: ModelConfig, layer: LayerConfig | None) -> bool:
        return operation == "attn_out"

    def attn_out(self, x: Stream, attention: Tensor, layer: LayerConfig, batch: Batch) -> Stream:
        return super().attn_out(x, attention, evolve(layer, has_gate=False), batch)


class MemoryForgotten(TorchOps):
    """Begins each step of several tokens with an empty memory."""

    def takes(self, operation: str, config: ModelConfig, layer: LayerConfig | None) -> bool:
        return operation == "delta_rule"

    def delta_rule(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        if batch.max_query_len > 1:
            batch.kv[layer.index].state["delta"].zero_()
        return super().delta_rule(x, layer, batch)
