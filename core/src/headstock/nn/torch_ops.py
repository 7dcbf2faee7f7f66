"""The operations in plain torch: the meaning that every other set must agree with."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from headstock.nn import kv, mlp, moe, norm, rope, sampling
from headstock.nn.composed import ComposedOps
from headstock.spi import Experts, Sample, Sampling, Weight


class TorchOps(ComposedOps):
    """Every operation on any device that torch knows."""

    def rms_norm(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        """See `norm.rms_norm`."""
        return norm.rms_norm(x, weight.tensor, eps)

    def head_norm(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        """See `norm.head_norm`."""
        return norm.head_norm(x, weight.tensor, eps)

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        """x W^T + b.   x: [tokens, in]    weight: [out, in]    returns: [tokens, out]"""
        return F.linear(x, weight.tensor, weight.bias)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `mlp.silu_and_mul`."""
        return mlp.silu_and_mul(gate_up)

    def rotate_(self, x: Tensor, turns: rope.Turns, out: Tensor) -> None:
        """See `rope.rotate_`."""
        rope.rotate_(x, turns, out)

    def store_kv_(self, pool: Tensor, cells: Tensor, kv_: Tensor) -> None:
        """See `kv.store_kv_`."""
        kv.store_kv_(pool, cells, kv_)

    def mix_experts(self, x: Tensor, scores: Tensor, experts: Experts, gate_up: Weight, down: Weight) -> Tensor:
        """See `moe.route` and `moe.mix_experts`."""
        return moe.mix_experts(x, *moe.route(scores, experts), gate_up.tensor, down.tensor)

    def lookup(self, tokens: Tensor, weight: Weight) -> Tensor:
        """Rows of the weight.   tokens: [tokens] int64    returns: [tokens, hidden]"""
        return F.embedding(tokens, weight.tensor)

    def sample(self, logits: Tensor, sampling_: Sampling) -> Sample:
        """See `sampling.sample`."""
        return sampling.sample(logits, sampling_)
