"""The torch operations with weights packed for oneDNN, for CPUs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headstock.errors import CannotRun
from headstock.nn.torch_ops import TorchOps
from headstock.spi import Weight

LINEAR = ("qkv", "attn_out", "gate_up", "down", "router", "lm_head")
"""The last parts of the names of parameters that are used by `linear` and by nothing else."""

TYPICAL_TOKENS = 32
"""The batch that the packing is laid out for; it serves any."""


class OneDnnOps(TorchOps):
    """`TorchOps` with the weights of linear maps packed once, when they are loaded, instead of in every product."""

    def __init__(self) -> None:
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            raise CannotRun("this build of torch has no oneDNN; use --ops torch")

    def prepare(self, name: str, weight: Weight) -> Weight:
        """Linear maps packed; others as they are."""
        if name.rpartition(".")[2] not in LINEAR:
            return weight
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.tensor, TYPICAL_TOKENS)
        return Weight(tensor=packed, bias=weight.bias)

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        """x W^T + b, by the packed weight where it is one (a tied embedding is not)."""
        if not weight.tensor.is_mkldnn:
            return F.linear(x, weight.tensor, weight.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.tensor, weight.bias, "none", [], "")
        return out
