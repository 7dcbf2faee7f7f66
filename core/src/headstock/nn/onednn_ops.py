"""The torch operations with weights packed for oneDNN, for CPUs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attrs import evolve
from torch import Tensor

from headstock.errors import CannotRun
from headstock.nn.norm import norm_by_length
from headstock.nn.torch_ops import TorchOps
from headstock.spi import Weight

LINEAR = ("qkv", "attn_out", "gate_up", "down", "router", "lm_head")
"""The last parts of the names of parameters that are used by `linear` and by nothing else."""

NORMS = ("attn_norm", "qk_norm", "mlp_norm", "norm")
"""Likewise by `rms_norm` and `head_norm`."""

TYPICAL_TOKENS = 32
"""The batch that the packing is laid out for; it serves any."""


class OneDnnOps(TorchOps):
    """`TorchOps` with the weights of linear maps packed once, when they are loaded, instead of in every product.

    Norms are by length, in fewer operations, so their weights are prepared as well.
    """

    def __init__(self) -> None:
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            raise CannotRun("this build of torch has no oneDNN; use --ops torch")
        self.floors: dict[tuple[int, float], Tensor] = {}

    def prepare(self, name: str, weight: Weight) -> Weight:
        """Linear maps packed, weights of norms times sqrt(n); others as they are."""
        plain, part = weight.tensor, name.rpartition(".")[2]
        if part in NORMS:
            return evolve(weight, tensor=plain * plain.shape[-1] ** 0.5)
        if part not in LINEAR:
            return weight
        packed = torch.ops.mkldnn._reorder_linear_weight(plain, TYPICAL_TOKENS)
        return Weight(tensor=packed, bias=weight.bias)

    def rms_norm(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        """See `headstock.nn.norm.norm_by_length`."""
        return norm_by_length(x, weight.tensor, self.floor(x.shape[-1], eps))

    def head_norm(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        """See `headstock.nn.norm.norm_by_length`."""
        return norm_by_length(x, weight.tensor, self.floor(x.shape[-1], eps))

    def floor(self, n: int, eps: float) -> Tensor:
        """The length of `n` numbers whose mean square is `eps`, kept: to make a tensor takes as long as to use it."""
        floor = self.floors.get((n, eps))
        if floor is None:
            floor = self.floors[n, eps] = torch.tensor((n * eps) ** 0.5)
        return floor

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        """x W^T + b, by the packed weight where it is one (a tied embedding is not)."""
        if not weight.tensor.is_mkldnn:
            return F.linear(x, weight.tensor, weight.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.tensor, weight.bias, "none", [], "")
        return out
