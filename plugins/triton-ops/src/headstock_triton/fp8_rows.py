"""Rows of activations in FP8, each with a scale of its own, and products of them.

Numbers and scales of a row depend on that row alone, so that it has the same bits by itself and in
a batch.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from headstock.spi import Weight
from headstock_triton.device_function import device_function
from headstock_triton.portable import round_to

LARGEST = tl.constexpr(448.0)
LEAST_SCALE = tl.constexpr(1e-30)
LEAST_CAPABILITY = (9, 0)
"""Of devices whose torch multiplies rows in FP8 by their scales."""


@frozen(eq=False)
class Fp8Rows:
    """values: [tokens, n] float8_e4m3fn    scales: [tokens, 1] float32"""

    values: Tensor
    scales: Tensor


def make_rows(like: Tensor, width: int) -> Fp8Rows:
    """Rows to be written, one for each of a tensor's."""
    return Fp8Rows(
        like.new_empty(len(like), width, dtype=torch.float8_e4m3fn),
        like.new_empty(len(like), 1, dtype=torch.float32),
    )


@device_function
def quantize_row(x):
    """A row's numbers in FP8, and the scale that they are to be multiplied by.

    x: [block] float32, 0 outside the row; NaN stays NaN
    """
    scale = tl.maximum(tl.max(tl.abs(x), 0) / LARGEST, LEAST_SCALE)
    value = x / scale
    # Rounding may have made the largest number larger; NaN compares as false and stays.
    value = tl.where(value > LARGEST, LARGEST, tl.where(value < -LARGEST, -LARGEST, value))
    return round_to(value, tl.float8e4nv), scale


@triton.jit
def quantize_kernel(x, values, scales, width, BLOCK: tl.constexpr):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    number = tl.load(x + row * width + at, at < width, other=0.0).to(tl.float32)
    value, scale = quantize_row(number)
    tl.store(scales + row, scale)
    tl.store(values + row * width + at, value, at < width)


def count_row_warps(block: int) -> int:
    """Warps of a program that has a whole row of that many numbers."""
    return min(max(block // 512, 1), 16)


def quantize_rows(x: Tensor) -> Fp8Rows:
    """The rows in FP8.   x: [tokens, n]"""
    tokens, width = x.shape
    rows, block = make_rows(x, width), triton.next_power_of_2(width)
    if tokens:
        quantize_kernel[(tokens,)](
            x.contiguous(),
            rows.values,
            rows.scales,
            width,
            BLOCK=block,
            num_warps=count_row_warps(block),
        )
    return rows


@cache
def can_multiply_rows(device: torch.device) -> bool:
    """Whether torch multiplies such rows by weights in FP8 on the device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def multiply_rows(rows: Fp8Rows, weight: Weight) -> Tensor:
    """x W^T + b.   weight: [out, in] in FP8 by row    returns: [tokens, out] bfloat16"""
    assert weight.scales is not None
    out: Tensor = torch._scaled_mm(
        rows.values,
        weight.tensor.t(),
        scale_a=rows.scales,
        scale_b=weight.scales.view(1, -1),
        out_dtype=torch.bfloat16,
    )
    return out if weight.bias is None else out.add_(weight.bias)
