"""Rows of activations in FP8 with scales of their own, and torch's products of them.

Numbers and scales of a row depend on that row alone, so that it has the same bits by itself and in
a batch.
"""

from __future__ import annotations

from enum import Enum
from functools import cache

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from headstock.spi import Weight
from headstock_triton.device_function import device_function
from headstock_triton.portable import round_to

LARGEST = tl.constexpr(448.0)
LEAST_SCALE = tl.constexpr(1e-30)
REST = tl.constexpr(16.0)
"""What the second number of a sum is larger by: the first has 4 of the 8 bits of bfloat16."""
GROUP_COLUMNS = 128
"""Columns of a row that share a scale, where a row has several: cuBLAS takes these."""
LEAST_CAPABILITY = (9, 0)
"""Of devices whose torch multiplies rows in FP8 by their scales."""
MOST_FAST_COLUMNS = 8192
"""Of a product that ends its sums of 14 bits, those of the tensor cores, once and not on the way.

On an H200 that takes 0.94 of the time for 24,576 x 4,096 numbers and prompts, and 1.00 for 4,096 x
12,288. What is lost is 1.2e-3 of the result, where rounding to bfloat16 loses 1.7e-3 and rounding
tokens and weights to FP8 3.8e-2; of 12,288 columns 2.6e-3.
"""
_GROUP = tl.constexpr(GROUP_COLUMNS)
_ROWS = 32
"""What the number of rows by group is a multiple of: cuBLAS reads 16 bytes of their scales at once,
and was tried with these.
"""


class RowForm(Enum):
    """What rows of FP8 are.

    EXACT: sums of two numbers, off by up to 2^-21 of the row's largest, with a scale a row
    BY_ROW: rounded, with a scale a row
    BY_GROUP: rounded, with a scale for each `GROUP_COLUMNS`
    """

    EXACT = "exact"
    BY_ROW = "by row"
    BY_GROUP = "by group"


@frozen(eq=False, kw_only=True)
class Fp8Rows:
    """Rows of a matrix [tokens, n].

    values: [tokens, n] float8_e4m3fn; of exact rows [2, tokens, n], of which the second is `REST`
        times as large; by group with some rows more, of any numbers
    scales: [tokens, 1] float32; of exact rows, powers of two; by group [rows of values, n /
        GROUP_COLUMNS], those of a column beside each other in memory
    """

    form: RowForm
    tokens: int
    values: Tensor
    scales: Tensor


def make_rows(like: Tensor, width: int, form: RowForm) -> Fp8Rows:
    """Rows to be written, one for each of a tensor's."""
    tokens, count = len(like), len(like)
    shape: tuple[int, ...] = (2, tokens, width) if form is RowForm.EXACT else (tokens, width)
    scales = like.new_empty(tokens, 1, dtype=torch.float32)
    if form is RowForm.BY_GROUP:
        count = triton.cdiv(tokens, _ROWS) * _ROWS
        shape = (count, width)
        scales = like.new_empty(width // GROUP_COLUMNS, count, dtype=torch.float32).t()
    values = like.new_empty(shape, dtype=torch.float8_e4m3fn)
    return Fp8Rows(form=form, tokens=tokens, values=values, scales=scales)


@device_function
def _to_numbers(x, scale):
    """x / scale in FP8.   returns: that, and before it was rounded"""
    value = x / scale
    # Rounding may have made the largest number larger; NaN compares as false and stays.
    value = tl.where(value > LARGEST, LARGEST, tl.where(value < -LARGEST, -LARGEST, value))
    return round_to(value, tl.float8e4nv), value


@device_function
def store_row(x, values, scales, width, at, stride, EXACT: tl.constexpr, GROUPED: tl.constexpr):
    """Write a program's row in FP8, and the scales that its numbers are to be multiplied by.

    x: [block] float32, 0 outside the row; NaN stays NaN
    EXACT: the row is written as a sum of two
    GROUPED: each `GROUP_COLUMNS` have a scale; those of a row are `stride` apart
    """
    row = tl.program_id(0).to(tl.int64)
    if GROUPED:
        groups: tl.constexpr = x.shape[0] // _GROUP
        parts = tl.reshape(x, (groups, _GROUP))
        scale = tl.maximum(tl.max(tl.abs(parts), 1) / LARGEST, LEAST_SCALE)
        number, _ = _to_numbers(parts, scale[:, None])
        group = tl.arange(0, groups)
        tl.store(scales + group * stride + row, scale, group * _GROUP < width)
        place = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        tl.store(values + row * width + place, number, place < width)
    else:
        scale = tl.maximum(tl.max(tl.abs(x), 0) / LARGEST, LEAST_SCALE)
        if EXACT:  # the next power of two, by which numbers are divided exactly
            scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(
                tl.float32, bitcast=True
            )
        number, value = _to_numbers(x, scale)
        tl.store(scales + row, scale)
        tl.store(values + row * width + at, number, at < width)
        if EXACT:
            rest = round_to((value - number.to(tl.float32)) * REST, tl.float8e4nv)
            tl.store(values + (tl.num_programs(0) + row) * width + at, rest, at < width)


@triton.jit
def quantize_kernel(
    x,
    values,
    scales,
    width,
    stride,
    EXACT: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row."""
    at = tl.arange(0, BLOCK)
    source = x + tl.program_id(0).to(tl.int64) * width + at
    number = tl.load(source, at < width, other=0.0).to(tl.float32)
    store_row(number, values, scales, width, at, stride, EXACT, GROUPED)


def count_row_warps(block: int) -> int:
    """Warps of a program that has a whole row of that many numbers."""
    return min(max(block // 512, 1), 16)


def quantize_rows(x: Tensor, form: RowForm = RowForm.BY_ROW) -> Fp8Rows:
    """The rows in FP8.   x: [tokens, n]"""
    tokens, width = x.shape
    rows, block = make_rows(x, width, form), triton.next_power_of_2(width)
    if tokens:
        quantize_kernel[(tokens,)](
            x.contiguous(),
            rows.values,
            rows.scales,
            width,
            len(rows.scales),
            EXACT=form is RowForm.EXACT,
            GROUPED=form is RowForm.BY_GROUP,
            BLOCK=block,
            num_warps=count_row_warps(block),
        )
    return rows


@cache
def can_multiply_rows(device: torch.device) -> bool:
    """Whether torch multiplies such rows by weights in FP8 on the device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


@cache
def can_multiply_groups(device: torch.device) -> bool:
    """Whether torch multiplies rows by group there: only Hopper has such products."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def multiply_rows(rows: Fp8Rows, weight: Weight) -> Tensor:
    """x W^T + b, of rows rounded by row.

    weight: [out, in] in FP8 by row
    returns: [tokens, out] bfloat16
    """
    assert weight.scales is not None
    out: Tensor = torch._scaled_mm(
        rows.values,
        weight.tensor.t(),
        scale_a=rows.scales,
        scale_b=weight.scales.view(1, -1),
        out_dtype=torch.bfloat16,
        use_fast_accum=rows.values.shape[1] <= MOST_FAST_COLUMNS,
    )
    return out if weight.bias is None else out.add_(weight.bias)


def multiply_groups(rows: Fp8Rows, weight: Weight, scales: Tensor) -> Tensor:
    """x W^T + b, of rows rounded by group.

    weight: [out, in] in FP8 by blocks of `GROUP_COLUMNS` rows and columns
    scales: [blocks of columns, blocks of rows] float32, those of a row beside each other in memory
    returns: [tokens, out] bfloat16
    """
    out = scaled_mm(
        rows.values,
        weight.tensor.t(),
        rows.scales,
        ScalingType.BlockWise1x128,
        scales,
        ScalingType.BlockWise128x128,
        SwizzleType.NO_SWIZZLE,
        SwizzleType.NO_SWIZZLE,
        output_dtype=torch.bfloat16,
    )[: rows.tokens]
    return out if weight.bias is None else out.add_(weight.bias)
