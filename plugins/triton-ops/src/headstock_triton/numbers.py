"""Numbers of packed weights, as kernels read them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstock.spi import Weight, WeightKind
from headstock_triton.device_function import device_function
from headstock_triton.portable import INTERPRETED, round_to, widen_to

_PACKINGS = {WeightKind.INT4: 1, WeightKind.FP4_E2M1: 2}
"""Numbers of which two lie in a byte; 0 is for those that fill their place."""
INT4 = tl.constexpr(_PACKINGS[WeightKind.INT4])
FP4 = tl.constexpr(_PACKINGS[WeightKind.FP4_E2M1])


def find_packing(weight: Weight) -> int:
    """The packing of a weight's numbers, as `widen` has it."""
    return 0 if weight.format is None else _PACKINGS.get(weight.format.kind, 0)


@device_function
def widen_integer(code, zero, dtype: tl.constexpr):
    """code - zero, exactly.   code: uint8 below 16    zero: float32"""
    # An integer is the fraction of a number with a known exponent: conversions are slower than
    # reading weights.
    if dtype == tl.float16:
        return (code.to(tl.uint16) | 0x6400).to(dtype, bitcast=True) - (zero + 1024.0).to(dtype)
    if dtype == tl.bfloat16 and not INTERPRETED:
        return (code.to(tl.uint16) | 0x4300).to(dtype, bitcast=True) - (zero + 128.0).to(dtype)
    return round_to(code.to(tl.float32) - zero, dtype)


@device_function
def widen_fp4(code, dtype: tl.constexpr):
    """The number with a sign, 2 bits of exponent and 1 of fraction.   code: uint8 below 16"""
    sign, short = (code & 8).to(tl.uint16) << 12, (code & 7).to(tl.uint16)
    # The bits are those of a small number of 16 bits, subnormal ones included.
    if dtype == tl.float16:
        return (sign | (short << 9)).to(dtype, bitcast=True) * 2.0**14
    if dtype == tl.bfloat16 and not INTERPRETED:
        return (sign | (short << 6)).to(dtype, bitcast=True) * 2.0**126
    bits = short.to(tl.int32)
    exponent, fraction = bits >> 1, bits & 1
    shifted = (2 + fraction) << tl.maximum(exponent - 1, 0)
    number = tl.where(exponent > 0, shifted, fraction).to(tl.float32) * 0.5
    return round_to(tl.where(code > 7, -number, number), dtype)


@device_function
def widen(numbers, zero, dtype: tl.constexpr, PACKING: tl.constexpr, ZEROS: tl.constexpr):
    """A tile of stored numbers less their zeros, in a type that has all of them.

    numbers: [rows, columns], or [rows, columns / 2] bytes    zero: [rows, 1] float32
    """
    if PACKING == INT4:
        low = widen_integer(numbers & 15, zero, dtype)
        high = widen_integer(numbers >> 4, zero, dtype)
        wide = tl.reshape(tl.join(low, high), (numbers.shape[0], 2 * numbers.shape[1]))
    elif PACKING == FP4:
        low, high = widen_fp4(numbers & 15, dtype), widen_fp4(numbers >> 4, dtype)
        wide = tl.reshape(tl.join(low, high), (numbers.shape[0], 2 * numbers.shape[1]))
    elif ZEROS:
        wide = round_to(numbers.to(tl.float32) - zero, dtype)
    else:
        wide = widen_to(numbers, dtype)
    return wide


@triton.jit
def unpack_kernel(
    weight,
    scales,
    zeros,
    out,
    width,
    ROW_GROUP: tl.constexpr,
    COLUMN_GROUP: tl.constexpr,
    PACKING: tl.constexpr,
    ZEROS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some columns of a row, as plain numbers."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    group = row // ROW_GROUP * tl.cdiv(width, COLUMN_GROUP) + at // COLUMN_GROUP
    if PACKING > 0:
        byte = tl.load(weight + row * (width // 2) + at // 2, inside, other=0)
        code = (byte >> (at % 2 * 4).to(tl.uint8)) & 15
        number = widen_fp4(code, tl.float32) if PACKING == FP4 else code.to(tl.float32)
    else:
        number = tl.load(weight + row * width + at, inside, other=0.0).to(tl.float32)
    if ZEROS:
        number -= tl.load(zeros + group, inside, other=0).to(tl.float32)
    elif PACKING == INT4:
        number -= 8.0
    scale = tl.load(scales + group, inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, round_to(number * scale, out.dtype.element_ty), inside)


def unpack(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The plain numbers of a prepared weight.   returns: [out, in]"""
    assert weight.format is not None
    assert weight.format.group is not None
    packing, numbers = find_packing(weight), weight.tensor
    rows, width = len(numbers), numbers.shape[1] * (2 if packing else 1)
    out = torch.empty(rows, width, dtype=dtype, device=numbers.device)
    block = min(triton.next_power_of_2(width), 2048)
    unpack_kernel[(rows, triton.cdiv(width, block))](
        numbers,
        weight.scales,
        # A pointer that the kernel without zeros does not read.
        numbers if weight.zeros is None else weight.zeros,
        out,
        width,
        ROW_GROUP=weight.format.group[0],
        COLUMN_GROUP=weight.format.group[1],
        PACKING=packing,
        ZEROS=weight.zeros is not None,
        BLOCK=block,
        num_warps=4,
    )
    return out


def narrow_scales(scales: Tensor) -> Tensor:
    """The scales in the narrowest type that has all of them.   scales: float32"""
    for dtype in (torch.bfloat16, torch.float16):
        narrow = scales.to(dtype)
        if torch.equal(narrow.float(), scales):
            return narrow
    return scales
