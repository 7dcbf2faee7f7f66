"""Numbers of 8 bits that are stored as they are, with scales beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from headstock.errors import ModelError, shorten
from headstock.spi import Weight, WeightFormat, WeightKind
from headstock.weights.quantization.reader import PackedTensor, Unpack, find_source
from headstock.weights.safetensors_header import TensorEntry

KINDS = {"F8_E4M3": WeightKind.FP8_E4M3, "I8": WeightKind.INT8}
"""Stored types -> what such numbers are."""

SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")


def find_scaled(
    name: str,
    entries: Mapping[str, TensorEntry],
    block: tuple[int, int] | None,
    ends: Sequence[str] = ("_scale_inv", "_scale"),
) -> PackedTensor:
    """Find the scales of a tensor of 8 bits.

    block: rows and columns of a scale; without it scales are one, or one for each row
    ends: what the name of the scales has after that of the tensor, one of these
    raises: ModelError
    """
    entry = entries[name]
    beside = f"{shorten(name)} is {entry.dtype}"
    scales = next((name + end for end in ends if name + end in entries), name + ends[0])
    if len(entry.shape) < 2 and scales in entries:
        raise ModelError(f"{beside} of shape {list(entry.shape)}, and no matrix")
    groups = _list_groups(entry.shape, block)
    stored = find_source(scales, entries, beside, SCALE_DTYPES, list(groups))
    group, zeros = groups[stored.shape], f"{name}_zero_point"
    sources: tuple[str, ...] = (name, scales)
    has_zeros = zeros in entries
    if has_zeros:
        find_source(zeros, entries, beside, ("I8",), [stored.shape])
        sources = (*sources, zeros)
    kind = KINDS[entry.dtype]
    format = WeightFormat(kind=kind, group=group, has_zeros=has_zeros)
    check = check_positive if kind is WeightKind.FP8_E4M3 else check_finite
    return PackedTensor(format, entry, sources, _make_unpack(format, scales, check))


def _list_groups(
    shape: tuple[int, ...], block: tuple[int, int] | None
) -> dict[tuple[int, ...], tuple[int, int] | None]:
    """The shapes that scales may have, each with rows and columns of a scale."""
    if len(shape) < 2:
        return {(): None}
    *stack, rows, columns = shape
    if block is None:
        return {(): None, (1,): None, (*stack, rows, 1): (1, columns)}
    return {(*stack, -(-rows // block[0]), -(-columns // block[1])): block}


def _make_unpack(format: WeightFormat, name: str, check: Callable[[str, Tensor], Tensor]) -> Unpack:
    """What makes a weight of numbers, scales and perhaps zeros."""

    def unpack(stored: Sequence[Tensor]) -> Weight:
        values, scales, *zeros = stored
        scales = check(name, scales)
        return Weight(
            tensor=values,
            scales=scales if format.group else scales.reshape(()),
            zeros=zeros[0].to(torch.int8) if zeros else None,
            format=format,
        )

    return unpack


def check_positive(name: str, scales: Tensor) -> Tensor:
    """The scales in float32.   raises: ValueError when one is not above 0"""
    scales = scales.float()
    # No quantizer writes a scale of 0: it would lose what it scales.
    if not bool((scales.isfinite() & (scales > 0)).all()):
        raise ValueError(f"{name} holds scales that are NaN, infinite or not above 0")
    return scales


def check_finite(name: str, scales: Tensor) -> Tensor:
    """The scales in float32.   raises: ValueError when one is not a number"""
    # Some quantizers make scales of integers negative, and 0 where a whole group is.
    scales = scales.float()
    if not bool(scales.isfinite().all()):
        raise ValueError(f"{name} holds scales that are NaN or infinite")
    return scales
