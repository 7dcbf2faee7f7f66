"""The operations in plain torch: the meaning that every other set must agree with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headstock.nn.kv import store_kv_, store_latent_
from headstock.nn.mlp import activate_and_mul
from headstock.nn.moe import mix_experts, route
from headstock.nn.norm import head_norm, rms_norm
from headstock.nn.rope import rotate_
from headstock.nn.sampler import sample
from headstock.nn.short_conv import ConvInputs, convolve_
from headstock.nn.vocab_shard import sample_shard
from headstock.ops.fine_tier import FineTierOps
from headstock.spi import Activation, Batch, ClampedGate, Experts, Sample, Sampling, Weight


class TorchOps(FineTierOps):
    """Every operation on any device that torch knows."""

    def rms_norm(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        """See `headstock.nn.norm.rms_norm`."""
        return rms_norm(x, weight.tensor, eps)

    def head_norm(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        """See `headstock.nn.norm.head_norm`."""
        return head_norm(x, weight.tensor, eps)

    def linear(self, x: Tensor, weight: Weight, batch: Batch | None) -> Tensor:
        """x W^T + b.   x: [tokens, in]    weight: [out, in]    returns: [tokens, out]"""
        return F.linear(x, weight.tensor, weight.bias)

    # The functions themselves: a call in between is felt in a step of one token on a CPU.
    activate_and_mul = staticmethod(activate_and_mul)
    rotate_ = staticmethod(rotate_)
    store_kv_ = staticmethod(store_kv_)
    store_latent_ = staticmethod(store_latent_)

    def head_linear(self, x: Tensor, weight: Weight) -> Tensor:
        """x W^T by head.   x: [tokens, heads, in]    weight: [heads, out, in]"""
        return torch.bmm(x.transpose(0, 1), weight.tensor.mT).transpose(0, 1)

    def convolve_(self, x: Tensor, weight: Weight, state: Tensor, inputs: ConvInputs) -> Tensor:
        """See `headstock.nn.short_conv.convolve_`."""
        return convolve_(x, weight.tensor, weight.bias, state, inputs)

    def route(self, scores: Tensor, experts: Experts, bias: Weight | None) -> tuple[Tensor, Tensor]:
        """See `headstock.nn.moe.route`."""
        return route(scores, experts, None if bias is None else bias.tensor)

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
        """See `headstock.nn.moe.mix_experts`."""
        return mix_experts(
            x,
            weights,
            ids,
            gate_up.tensor,
            down.tensor,
            activation,
            biases=None if gate_up.bias is None or down.bias is None else (gate_up.bias, down.bias),
            is_shard=self.config.shard.by_expert,
        )

    def lookup(self, tokens: Tensor, weight: Weight) -> Tensor:
        """Rows of the weight.   tokens: [tokens] int64    returns: [tokens, hidden]"""
        return F.embedding(tokens, weight.tensor)

    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        """See `headstock.nn.sampler.sample`."""
        return sample(logits, sampling)

    def sample_shard(self, logits: Tensor, sampling: Sampling) -> Sample:
        """See `headstock.nn.vocab_shard.sample_shard`."""
        return sample_shard(logits, sampling, self.config, self.all_gather)
