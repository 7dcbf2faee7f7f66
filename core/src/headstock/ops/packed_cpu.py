"""Products of a CPU with weights in 8 and 4 bits, by kernels of torch.

Each row of a product depends on that row alone, so it has the same bits by itself and in a batch.
"""

from __future__ import annotations

import warnings

import torch
from attrs import frozen
from torch import Tensor

from headstock.spi import Weight, WeightFormat, WeightKind

_INT4_GROUPS = (32, 64, 128, 256)
_INT4_ROWS = 16
"""Of what the outputs of torch's kernel for 4 bits are a multiple."""

_LEAST = torch.finfo(torch.float32).tiny


@frozen(kw_only=True, eq=False)
class Int8Weight(Weight):
    """A linear map in INT8, packed by FBGEMM.

    tensor: [out, in], on the meta device
    packed: FBGEMM's own object, without the bias
    step, zero: rows are divided by their largest number, then by the step, and get the zero added
    """

    packed: torch.ScriptObject
    step: float
    zero: int

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers, of a scale and a sum for each row, and of the bias."""
        rows = self.tensor.shape[0]
        return self.tensor.numel() + 8 * rows + (0 if self.bias is None else self.bias.nbytes)


@frozen(kw_only=True, eq=False)
class Int4Weight(Weight):
    """A linear map in INT4, packed by torch.

    tensor: as torch packs it    factors: [in / group, out, 2] bfloat16, scales and what is added
    """

    factors: Tensor
    group: int

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers, of what they are scaled by, and of the bias."""
        bias = 0 if self.bias is None else self.bias.nbytes
        return self.tensor.nbytes + self.factors.nbytes + bias


def can_multiply(shape: tuple[int, ...], format: WeightFormat) -> bool:
    """Whether a map of that shape can be multiplied by as it is packed."""
    if len(shape) != 2 or format.group is None:
        return len(shape) == 2 and format.kind is WeightKind.INT8 and not format.has_zeros
    rows, columns = shape
    if format.group[0] != 1:
        return False
    if format.kind is WeightKind.INT8:
        return format.group[1] >= columns and not format.has_zeros
    return (
        format.kind is WeightKind.INT4
        and format.group[1] in _INT4_GROUPS
        and columns % format.group[1] == 0
        and rows % _INT4_ROWS == 0
    )


def pack_int8(weight: Weight) -> Int8Weight:
    """The weight as FBGEMM needs it.   weight: INT8 with a scale for each row, or one"""
    assert weight.scales is not None
    rows = weight.tensor.shape[0]
    with warnings.catch_warnings():
        # torch says that quantized tensors will move to another package
        warnings.simplefilter("ignore", (UserWarning, DeprecationWarning))
        quantized = torch._make_per_channel_quantized_tensor(
            weight.tensor.contiguous(),
            weight.scales.reshape(-1).expand(rows).double(),
            torch.zeros(rows, dtype=torch.int64),
            0,
        )
        packed = torch.ops.quantized.linear_prepack(quantized, None)
    # Without VNNI two products are added in 16 bits, which rows of 7 bits alone cannot overflow.
    step, zero = (1 / 127, 128) if torch.cpu._is_vnni_supported() else (1 / 63, 64)
    return Int8Weight(
        tensor=weight.tensor.to("meta"), bias=weight.bias, packed=packed, step=step, zero=zero
    )


def multiply_int8(x: Tensor, weight: Int8Weight) -> Tensor:
    """x W^T + b, with rows of `x` in 8 bits.   x: [tokens, in] float32"""
    most = x.abs().amax(1, keepdim=True).clamp_(min=_LEAST)
    out: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
        x / most, weight.step, weight.zero, weight.packed
    )
    out.mul_(most)
    return out if weight.bias is None else out.add_(weight.bias)


def pack_int4(weight: Weight) -> Int4Weight:
    """The weight as torch's kernel needs it.   weight: INT4 with groups of columns"""
    assert weight.scales is not None
    assert weight.format is not None
    assert weight.format.group is not None
    numbers = torch.stack((weight.tensor & 15, weight.tensor >> 4), -1).flatten(-2)
    zeros = 8.0 if weight.zeros is None else weight.zeros.float()
    # torch multiplies the number less 8, and adds.
    factors = torch.stack((weight.scales, (8.0 - zeros) * weight.scales), -1).transpose(0, 1)
    return Int4Weight(
        tensor=torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.int(), 1),
        bias=weight.bias,
        factors=factors.to(torch.bfloat16).contiguous(),
        group=weight.format.group[1],
    )


def multiply_int4(x: Tensor, weight: Int4Weight) -> Tensor:
    """x W^T + b, with `x` in bfloat16.   x: [tokens, in] float32"""
    out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
        x.to(torch.bfloat16), weight.tensor, weight.group, weight.factors
    ).float()
    return out if weight.bias is None else out.add_(weight.bias)
