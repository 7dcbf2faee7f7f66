"""Rows of activations in FP8, each with a scale of its own, and torch's products of them.

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
REST = tl.constexpr(16.0)
"""What the second number of a sum is larger by: the first has 4 of the 8 bits of bfloat16."""
LEAST_CAPABILITY = (9, 0)
"""Of devices whose torch multiplies rows in FP8 by their scales."""


@frozen(eq=False)
class Fp8Rows:
    """Rounded rows, or exact ones: sums of two numbers.

    values: [tokens, n] float8_e4m3fn; or [2, tokens, n], of which the second is `REST` times as
        large
    scales: [tokens, 1] float32; of exact rows, powers of two
    """

    values: Tensor
    scales: Tensor

    @property
    def are_exact(self) -> bool:
        """Whether numbers are sums of two: off by up to 2^-21 of the row's largest."""
        return self.values.dim() == 3


def make_rows(like: Tensor, width: int, *, exact: bool) -> Fp8Rows:
    """Rows to be written, one for each of a tensor's."""
    shape = (2, len(like), width) if exact else (len(like), width)
    return Fp8Rows(
        like.new_empty(shape, dtype=torch.float8_e4m3fn),
        like.new_empty(len(like), 1, dtype=torch.float32),
    )


@device_function
def store_row(x, values, scales, width, at, EXACT: tl.constexpr):
    """Write a program's row in FP8, and the scale that its numbers are to be multiplied by.

    x: [block] float32, 0 outside the row; NaN stays NaN
    EXACT: the row is written as a sum of two
    """
    row = tl.program_id(0).to(tl.int64)
    scale = tl.maximum(tl.max(tl.abs(x), 0) / LARGEST, LEAST_SCALE)
    if EXACT:  # the next power of two, by which numbers are divided exactly
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(
            tl.float32, bitcast=True
        )
    value = x / scale
    # Rounding may have made the largest number larger; NaN compares as false and stays.
    value = tl.where(value > LARGEST, LARGEST, tl.where(value < -LARGEST, -LARGEST, value))
    number = round_to(value, tl.float8e4nv)
    tl.store(scales + row, scale)
    tl.store(values + row * width + at, number, at < width)
    if EXACT:
        rest = round_to((value - number.to(tl.float32)) * REST, tl.float8e4nv)
        tl.store(values + (tl.num_programs(0) + row) * width + at, rest, at < width)


@triton.jit
def quantize_kernel(x, values, scales, width, EXACT: tl.constexpr, BLOCK: tl.constexpr):
    """One row."""
    at = tl.arange(0, BLOCK)
    source = x + tl.program_id(0).to(tl.int64) * width + at
    number = tl.load(source, at < width, other=0.0).to(tl.float32)
    store_row(number, values, scales, width, at, EXACT)


def count_row_warps(block: int) -> int:
    """Warps of a program that has a whole row of that many numbers."""
    return min(max(block // 512, 1), 16)


def quantize_rows(x: Tensor, *, exact: bool = False) -> Fp8Rows:
    """The rows in FP8.   x: [tokens, n]"""
    tokens, width = x.shape
    rows, block = make_rows(x, width, exact=exact), triton.next_power_of_2(width)
    if tokens:
        quantize_kernel[(tokens,)](
            x.contiguous(),
            rows.values,
            rows.scales,
            width,
            EXACT=exact,
            BLOCK=block,
            num_warps=count_row_warps(block),
        )
    return rows


@cache
def can_multiply_rows(device: torch.device) -> bool:
    """Whether torch multiplies such rows by weights in FP8 on the device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def multiply_rows(rows: Fp8Rows, weight: Weight) -> Tensor:
    """x W^T + b, of rounded rows.

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
    )
    return out if weight.bias is None else out.add_(weight.bias)
