"""Make plain tensors of packed weights."""

from __future__ import annotations

import torch
from torch import Tensor

from headstock.spi import Weight

_NUMBERS_AT_ONCE = 1 << 20
"""How many numbers are unpacked at a time: a matrix in float32 beside its packed form would be the
most memory that a load takes."""


def dequantize_(weight: Weight, out: Tensor, start: tuple[int, int] = (0, 0)) -> None:
    """Write what a packed weight stands for, value times scale in float32, rounded once.

    weight: values [..., rows, columns], FP8_E4M3 with scales [..., rows / group, columns / group]
        rounded up, or one scale
    start: the row and the column of the weight at which `out` begins
    writes: out, [..., rows, columns] or a part of it
    """
    assert weight.format is not None
    assert weight.scales is not None
    values, scales = weight.tensor, weight.scales.to(out.device, torch.float32)
    # One scale is that of a single block.
    group = weight.format.group or (values.shape[-2], values.shape[-1])
    if weight.format.group is None:
        scales = scales.reshape(*[1] * values.dim()).expand(*values.shape[:-2], 1, 1)
    _dequantize_rows(values, scales, group, out, start)


def _dequantize_rows(
    values: Tensor, scales: Tensor, group: tuple[int, int], out: Tensor, start: tuple[int, int]
) -> None:
    """Write each matrix of a stack, some rows at a time.   writes: out"""
    if values.dim() > 2:
        for each in range(len(values)):
            _dequantize_rows(values[each], scales[each], group, out[each], start)
        return
    rows, columns = out.shape
    first_row, first_column = start
    blocks = torch.arange(first_column, first_column + columns, device=out.device) // group[1]
    step = max(1, _NUMBERS_AT_ONCE // max(1, columns))
    for row in range(0, rows, step):
        part = out[row : row + step]
        begin, end = first_row + row, first_row + row + len(part)
        stored = values[begin:end, first_column : first_column + columns]
        row_blocks = torch.arange(begin, end, device=out.device) // group[0]
        part.copy_(stored.to(out.device).float().mul_(scales[row_blocks][:, blocks]))
