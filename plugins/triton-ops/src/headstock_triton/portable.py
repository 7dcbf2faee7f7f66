"""What Triton's interpreter does otherwise than its compiler, put right."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """`x` in the dtype, rounded to nearest even: without being told, the interpreter cuts to bfloat16."""
    if INTERPRETED and x.dtype != dtype and dtype == tl.bfloat16:
        return x.to(dtype, fp_downcast_rounding="rtne")
    return x.to(dtype)


@triton.jit
def log1p(x):
    """ln(1 + x) as torch has it on the device; the interpreter has no such function, but float64."""
    if INTERPRETED:
        return tl.log(1.0 + x.to(tl.float64)).to(tl.float32)
    return libdevice.log1p(x)
