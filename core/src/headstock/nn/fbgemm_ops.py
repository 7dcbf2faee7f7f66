"""The torch operations with linear maps kept in half the bytes where that loses nothing, for CPUs."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from headstock.errors import CannotRun
from headstock.nn.onednn_ops import LINEAR, OneDnnOps
from headstock.spi import Weight

LOSS = 4 * 2.0**-24
"""Four roundings of float32, in which a sum of n products may be off by n of them."""


@frozen(kw_only=True, eq=False)
class HalfWeight(Weight):
    """A linear map in float16. `tensor` is on the meta device and has its shape; the numbers are in `packed`.

    packed: FBGEMM's own object, with the bias
    """

    packed: torch.ScriptObject


class FbgemmOps(OneDnnOps):
    """`OneDnnOps`, but a map whose numbers float16 holds as well as float32 is kept so, and read in half the time.

    Checkpoints in float16 and bfloat16 have such maps: float16 has the longer fraction, and of what it cannot hold
    there is next to nothing. Activations, products and sums are float32.
    """

    def __init__(self) -> None:
        super().__init__()
        engine: str = torch.backends.quantized.engine
        if engine not in ("x86", "fbgemm"):
            raise CannotRun(f"torch's quantized engine is {engine}, not x86 or fbgemm; use --ops onednn or --ops torch")

    def prepare(self, name: str, weight: Weight) -> Weight:
        """Linear maps that fit in float16 packed so; others as `OneDnnOps` has them."""
        if name.rpartition(".")[2] not in LINEAR or not fits(weight.tensor):
            return super().prepare(name, weight)
        packed = torch.ops.quantized.linear_prepack_fp16(weight.tensor, weight.bias)
        return HalfWeight(tensor=weight.tensor.to("meta", torch.float16), bias=weight.bias, packed=packed)

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        """x W^T + b, by the packed weight where it is one."""
        if not isinstance(weight, HalfWeight):
            return super().linear(x, weight)
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, weight.packed)
        return out


def fits(weight: Tensor) -> bool:
    """Whether no row changes by more than `LOSS` of its length when it is rounded to float16.

    Its product with any vector then changes by no more than that share of both lengths.
    weight: [out, in] float32
    """
    lost = weight.half().float().sub_(weight).norm(dim=1)
    return bool((lost <= LOSS * weight.norm(dim=1)).all())
