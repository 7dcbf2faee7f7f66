"""Make plain tensors of packed weights."""

from __future__ import annotations

import torch
from attrs import evolve
from torch import Tensor

from headstock.spi import Weight, WeightKind

_FP4 = [sign * number for sign in (1, -1) for number in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
"""What 4 bits stand for: a sign, 2 bits of exponent and 1 of fraction."""

NUMBER_BYTES = {
    WeightKind.FP8_E4M3: 1.0,
    WeightKind.INT8: 1.0,
    WeightKind.INT4: 0.5,
    WeightKind.FP4_E2M1: 0.5,
}
"""Bytes of a packed number."""

_NUMBERS_AT_ONCE = 1 << 20
"""How many numbers are unpacked at a time: a matrix in float32 beside its packed form would be the
most memory that a load takes."""


def dequantize_(weight: Weight, out: Tensor, start: tuple[int, int] = (0, 0)) -> None:
    """Write what a packed weight stands for, value times scale in float32, rounded once.

    weight: values [..., rows, columns] with scales [..., rows / group, columns / group] rounded up,
        or one scale. Of 4 bits values are [..., rows, columns / 2] bytes
    start: the row and the column of the weight at which `out` begins
    writes: out, [..., rows, columns] or a part of it
    """
    assert weight.format is not None
    assert weight.scales is not None
    values = weight.tensor
    scales = weight.scales.to(out.device, torch.float32)
    zeros = None if weight.zeros is None else weight.zeros.to(out.device)
    order = None if weight.order is None else weight.order.to(out.device)
    columns = values.shape[-1] * (2 if values.dtype is torch.uint8 else 1)
    # One scale is that of a single block.
    group = weight.format.group or (values.shape[-2], columns)
    if weight.format.group is None:
        blocks = (*values.shape[:-2], 1, 1)
        scales = scales.reshape(*[1] * values.dim()).expand(blocks)
        zeros = None if zeros is None else zeros.reshape(*[1] * values.dim()).expand(blocks)
    moved = evolve(weight, tensor=values, scales=scales, zeros=zeros, order=order)
    _dequantize_matrices(moved, group, out, start)


def _dequantize_matrices(
    weight: Weight, group: tuple[int, int], out: Tensor, start: tuple[int, int]
) -> None:
    """Write each matrix of a stack, some rows at a time.   writes: out"""
    assert weight.scales is not None
    if weight.tensor.dim() > 2:
        for each in range(len(weight.tensor)):
            zeros = None if weight.zeros is None else weight.zeros[each]
            matrix = evolve(
                weight, tensor=weight.tensor[each], scales=weight.scales[each], zeros=zeros
            )
            _dequantize_matrices(matrix, group, out[each], start)
        return
    rows, columns = out.shape
    first_row, first_column = start
    step = max(1, _NUMBERS_AT_ONCE // max(1, columns))
    for row in range(0, rows, step):
        part = out[row : row + step]
        begin = first_row + row
        numbers = _read_rows(weight, group, (begin, begin + len(part)), out.device)
        part.copy_(numbers[:, first_column : first_column + columns])


def _read_rows(
    weight: Weight, group: tuple[int, int], rows: tuple[int, int], device: torch.device
) -> Tensor:
    """The numbers of some rows.   returns: [rows, columns] float32"""
    assert weight.format is not None
    assert weight.scales is not None
    numbers = _read_numbers(weight.tensor[rows[0] : rows[1]].to(device), weight.format.kind)
    row_blocks = torch.arange(*rows, device=device) // group[0]
    blocks = torch.arange(numbers.shape[1], device=device) // group[1]
    blocks.clamp_(max=weight.scales.shape[1] - 1)  # a byte's second half behind the last column
    if weight.zeros is not None:
        numbers.sub_(weight.zeros[row_blocks][:, blocks])
    elif weight.format.kind is WeightKind.INT4:
        numbers.sub_(8)
    numbers.mul_(weight.scales[row_blocks][:, blocks])
    if weight.order is None:
        return numbers
    found = torch.empty_like(numbers)
    found[:, weight.order] = numbers
    return found


def _read_numbers(values: Tensor, kind: WeightKind) -> Tensor:
    """Stored numbers in float32.   values: [rows, columns], or [rows, columns / 2] uint8"""
    if kind is WeightKind.FP8_E4M3 or kind is WeightKind.INT8:
        return values.to(torch.float32)
    places = torch.stack((values & 15, values >> 4), -1).flatten(-2)
    if kind is WeightKind.INT4:
        return places.to(torch.float32)
    return torch.tensor(_FP4, dtype=torch.float32, device=values.device)[places.int()]
