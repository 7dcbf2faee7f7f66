"""Temperatures inside kernels, as in `headstock.nn.sampler`."""

from __future__ import annotations

import triton.language as tl

from headstock.nn.sampler import COLDEST
from headstock_triton.device_function import device_function

LOWEST_HEAT = tl.constexpr(COLDEST)


@device_function
def apply_temperature(x, level, heat):
    """(x - level) / temperature, rounded as torch rounds; temperature 0 divides by 1."""
    return tl.div_rn(x - level, tl.where(heat > 0, tl.maximum(heat, LOWEST_HEAT), 1.0))
