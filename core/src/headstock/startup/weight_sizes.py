"""How many bytes the weights of a model take, plain or quantized at load."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import ceil, prod

import torch

from headstock import weights
from headstock.spi import ParamSpec, WeightFormat, WeightKind
from headstock.startup.memory_plan import format_bytes

_SMALL_MODEL = 1 << 30
"""Bytes of weights below which a person gains little by quantizing them."""
QUANTS = {"int8": WeightKind.INT8, "int4": WeightKind.INT4}
"""Values of --quant that a model which is too large may fit with, the best first."""
_SCALE_BYTES = 4
_ZERO_BYTES = 1

TakesFormat = Callable[[ParamSpec, WeightFormat], bool]


def count_weight_bytes(
    specs: Iterable[ParamSpec],
    dtype: str,
    kind: WeightKind | None = None,
    takes_format: TakesFormat = lambda _, __: True,
) -> int:
    """Count the bytes of a model's parameters in `dtype`.

    kind: the numbers that linear maps are quantized to; None for none
    takes_format: which maps stay packed
    """
    count = 0
    for spec in specs:
        format = None if kind is None else weights.choose_format(kind, spec)
        if format is None or not takes_format(spec, format):
            count += prod(spec.shape) * getattr(torch, spec.dtype or dtype).itemsize
        else:
            count += _count_packed(spec, format)
    return count


def _count_packed(spec: ParamSpec, format: WeightFormat) -> int:
    """Count the bytes of a map, or of many experts', and of what belongs to each group."""
    assert format.group is not None
    *count, rows, columns = spec.shape
    numbers = prod(spec.shape)
    if format.kind is WeightKind.INT4:
        numbers = ceil(numbers / 2)
    groups = prod(count) * ceil(rows / format.group[0]) * ceil(columns / format.group[1])
    return numbers + groups * (_SCALE_BYTES + _ZERO_BYTES * format.has_zeros)


def suggest_quant(
    specs: Iterable[ParamSpec], dtype: str, takes_format: TakesFormat, free: int
) -> str:
    """Which values of --quant would let weights fit that do not, for an error; else empty."""
    listed = list(specs)
    sizes = {
        name: count_weight_bytes(listed, dtype, kind, takes_format) for name, kind in QUANTS.items()
    }
    return " or ".join(
        f"{name} ({format_bytes(size)})" for name, size in sizes.items() if size <= free
    )


def offer_int8(specs: Iterable[ParamSpec], dtype: str, takes_format: TakesFormat) -> str:
    """What a person on a CPU would gain by --quant int8; empty where that is little.

    The 0.6B shape made 1.37 times as many tokens with it on a CPU of two cores.
    """
    listed = list(specs)
    plain = count_weight_bytes(listed, dtype)
    packed = count_weight_bytes(listed, dtype, WeightKind.INT8, takes_format)
    if plain < _SMALL_MODEL or packed > plain // 2:
        return ""
    return (
        f"quant (--quant) int8 would take {format_bytes(packed)} for the weights in place of "
        f"{format_bytes(plain)}; tokens usually come faster too"
    )
