"""Make packed weights of plain tensors, for `--quant`."""

from __future__ import annotations

import torch
from torch import Tensor

from headstock.spi import ParamSpec, Role, Weight, WeightFormat, WeightKind

_LARGEST = {WeightKind.FP8_E4M3: 448.0, WeightKind.INT8: 127.0}

_GROUPS = (128, 64, 32)
"""Columns that share a scale of 4 bits: the first that divides all of them."""

_SHRINKS = torch.linspace(1.0, 0.7, 16).tolist()
"""By how much the range of a group may shrink: its outliers are cut where the others gain more.

With 16 of them the demo model's log-probabilities are off by a KL of 5.0e-4; with the first alone
by 6.8e-4.
"""

_NUMBERS_AT_ONCE = 1 << 20
# Each part is hundreds of launches, so that small parts of experts would take minutes.
_NUMBERS_AT_ONCE_ON_DEVICES = 1 << 23


def choose_format(kind: WeightKind, spec: ParamSpec) -> WeightFormat | None:
    """Choose how a parameter is packed in these numbers; None for one that stays plain.

    Linear maps and experts alone are packed: embeddings, output matrices and routers lose by it.
    """
    dimensions = {Role.LINEAR: 2, Role.EXPERTS: 3}
    if [len(spec.shape)] != [dimensions.get(role) for role in spec.roles]:
        return None
    columns = spec.shape[-1]
    if kind is not WeightKind.INT4:
        return WeightFormat(kind=kind, group=(1, columns))
    group = next((size for size in _GROUPS if columns % size == 0), None)
    return None if group is None else WeightFormat(kind=kind, group=(1, group), has_zeros=True)


def quantize(tensor: Tensor, format: WeightFormat) -> Weight:
    """Pack matrices, each row or group of columns by itself.

    tensor: [..., rows, columns]
    format: one of `choose_format`
    """
    assert format.group is not None
    pack = _pack_int4 if format.kind is WeightKind.INT4 else _pack_rows
    most = _NUMBERS_AT_ONCE if tensor.device.type == "cpu" else _NUMBERS_AT_ONCE_ON_DEVICES
    step, stack = max(1, most // tensor.shape[-1]), tensor.shape[:-1]
    parts = [pack(rows.float(), format) for rows in torch.split(tensor.flatten(0, -2), step)]

    def join(name: str) -> Tensor:
        joined: Tensor = torch.cat([getattr(each, name) for each in parts])
        return joined.reshape(*stack, joined.shape[1])

    return Weight(
        tensor=join("tensor"),
        scales=join("scales"),
        zeros=join("zeros") if format.has_zeros else None,
        format=format,
    )


def _pack_rows(rows: Tensor, format: WeightFormat) -> Weight:
    """8 bits with a scale for each row."""
    largest = _LARGEST[format.kind]
    scales = rows.abs().amax(1, keepdim=True) / largest
    scales = torch.where(scales > 0, scales, 1.0)
    numbers = rows / scales
    if format.kind is WeightKind.INT8:
        values = numbers.round_().clamp_(-largest, largest).to(torch.int8)
    else:
        values = numbers.clamp_(-largest, largest).to(torch.float8_e4m3fn)
    return Weight(tensor=values, scales=scales, format=format)


def _pack_int4(rows: Tensor, format: WeightFormat) -> Weight:
    """4 bits with a scale and a zero for each group, of the range with the least square error."""
    assert format.group is not None
    groups = rows.view(len(rows), -1, format.group[1])
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    # The range has zero in it, so that zeros fit in 4 bits.
    low, high = low.clamp_(max=0), high.clamp_(min=0)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    least = torch.full_like(low, torch.inf)
    for shrink in _SHRINKS:
        scales = (high - low) * (shrink / 15)
        scales = torch.where(scales > 0, scales, 1.0)
        zeros = (low * -shrink / scales).round_().clamp_(0, 15)
        values = (groups / scales).add_(zeros).round_().clamp_(0, 15)
        error = (values - zeros).mul_(scales).sub_(groups).square_().sum(-1, keepdim=True)
        if best is not None:
            is_better = error < least
            values, scales, zeros = (
                torch.where(is_better, new, old)
                for new, old in zip((values, scales, zeros), best, strict=True)
            )
        best, least = (values, scales, zeros), torch.minimum(error, least)
    assert best is not None
    values, scales, zeros = best
    numbers = values.flatten(1).to(torch.uint8)
    return Weight(
        tensor=numbers[:, ::2] | numbers[:, 1::2] << 4,
        scales=scales.squeeze(-1),
        zeros=zeros.squeeze(-1).to(torch.int8),
        format=format,
    )
