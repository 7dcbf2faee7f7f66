"""Corrections for differences between Triton's interpreter and its compiler."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from headstock_triton.device_function import device_function

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@device_function
def _eight_bits(x):
    """float32 up to 448 as e4m3: four bits of exponent (bias 7), three of fraction.

    returns: uint8
    """
    bits = tl.abs(x).to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    small = (tl.abs(x) * 2.0**9 + 2.0**23).to(tl.uint32, bitcast=True) & 0xFF  # a multiple of 2^-9
    code = tl.where(tl.abs(x) < 2.0**-6, small, normal)
    return tl.where(x == x, code | tl.where(x < 0, 0x80, 0), 0x7F).to(tl.uint8)


@device_function
def round_to(x, dtype: tl.constexpr):
    """`x` in the dtype, rounded to nearest even.

    The interpreter's own conversion truncates, gets carries wrong and loses NaN.
    """
    if INTERPRETED and x.dtype == tl.float32:
        if dtype == tl.bfloat16:
            bits = x.to(tl.uint32, bitcast=True).to(tl.uint64)
            bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
            return (bits >> 16).to(tl.uint16).to(dtype, bitcast=True)
        if dtype == tl.float8e4nv:
            return _eight_bits(x).to(dtype, bitcast=True)
    return x.to(dtype)


@device_function
def widen_to(x, dtype: tl.constexpr):
    """`x` in the dtype, which has all its numbers."""
    wide = x
    if x.dtype != dtype:
        # The interpreter cannot convert integers to bfloat16.
        wide = round_to(x.to(tl.float32), dtype) if INTERPRETED else x.to(dtype)
    return wide


@device_function
def log1p(x):
    """ln(1 + x) as torch computes it on the device; the interpreter uses float64 instead."""
    if INTERPRETED:
        return tl.log(1.0 + x.to(tl.float64)).to(tl.float32)
    return libdevice.log1p(x)


@device_function
def fast_log2(x):
    """log2(x) of normal numbers by a device instruction: within 2^-22, relative if the result is
    above 1.
    """
    if INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@device_function
def _greater_or_nan(left, right):
    return tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@device_function
def max_or_nan(x):
    """The maximum of a block; NaN where there is one. The interpreter is slow to combine by a
    function.
    """
    if INTERPRETED:
        highest = tl.max(tl.where(x != x, -float("inf"), x), 0)
        return tl.where(tl.max((x != x).to(tl.int32), 0) > 0, float("nan"), highest)
    return tl.reduce(x, 0, _greater_or_nan)


@device_function
def _add_each(a, b, c, x, y, z):
    return a + x, b + y, c + z


@device_function
def sum_three(x, y, z):
    """The sums of three blocks of one dimension, in one exchange between warps."""
    if INTERPRETED:
        return tl.sum(x, 0), tl.sum(y, 0), tl.sum(z, 0)
    return tl.reduce((x, y, z), 0, _add_each)


@device_function
def add_product(lhs, rhs, sums):
    """sums + lhs @ rhs, in float32; the interpreter treats bfloat16 as integers there."""
    if INTERPRETED:
        return tl.dot(lhs.to(tl.float32), rhs.to(tl.float32), sums)
    return tl.dot(lhs, rhs, sums)


@device_function
def multiply(lhs, rhs):
    """lhs @ rhs, in float32; products of float32 are nearly as exact as such."""
    if INTERPRETED:
        return tl.dot(lhs.to(tl.float32), rhs.to(tl.float32), input_precision="ieee")
    return tl.dot(lhs, rhs, input_precision="tf32x3")
