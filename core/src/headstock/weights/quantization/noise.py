"""Random weights in packed formats, for measurements without a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve
from torch import Tensor

from headstock.spi import ParamSpec, Role, Weight, WeightFormat, WeightKind
from headstock.weights.quantization.reader import QuantReader

NOISE_STD = 0.02
"""Standard deviation of random weights."""
_LEVEL = 32.0
"""Standard deviation of numbers of 8 bits."""

_SCALES = {
    WeightKind.FP8_E4M3: NOISE_STD / _LEVEL,
    WeightKind.INT8: NOISE_STD / _LEVEL,
    # Of 0 to 15, minus 8.
    WeightKind.INT4: NOISE_STD / 4.6,
    # Of the 16 numbers of FP4, as MXFP4 has it: a power of two, here with 0.023.
    WeightKind.FP4_E2M1: 2.0**-7,
}
"""What makes the numbers as large as other noise."""


def choose_noise_format(spec: ParamSpec, reader: QuantReader) -> WeightFormat | None:
    """Choose the format of a parameter of noise; None for one that stays plain.

    Linear maps and experts have the first format of the configuration, whatever it says of single
    modules.
    """
    packed = {Role.EXPERTS} if reader.packs_experts_alone else {Role.EXPERTS, Role.LINEAR}
    if not reader.formats or not spec.roles or not spec.roles <= packed or len(spec.shape) < 2:
        return None
    if spec.transform is not None and spec.packed_rows is None:
        return None  # such parameters of a checkpoint are made plain
    format, (outs, width) = reader.formats[0], spec.shape[-2:]
    rows, columns = format.group or (1, width)
    columns = min(columns, width)
    if format.kind in (WeightKind.INT4, WeightKind.FP4_E2M1) and (width % 2 or width % columns):
        return None
    return evolve(format, group=(min(rows, outs), columns))


def make_noise(shape: Sequence[int], format: WeightFormat, noise: torch.Generator) -> Weight:
    """Make random numbers in the format, on the generator's device.

    shape: [..., rows, columns]    format: one of `choose_noise_format`
    """
    assert format.group is not None
    *stack, outs, width = shape
    rows, columns = format.group
    groups = (*stack, -(-outs // rows), -(-width // columns))
    scales = torch.full(groups, _SCALES[format.kind], device=noise.device)
    zeros = torch.full(groups, 8, dtype=torch.int8, device=noise.device)
    return Weight(
        tensor=_draw((*stack, outs, width), format.kind, noise),
        scales=scales,
        zeros=zeros if format.has_zeros else None,
        format=format,
    )


def _draw(shape: tuple[int, ...], kind: WeightKind, noise: torch.Generator) -> Tensor:
    """Numbers of the kind, two in a byte if they have 4 bits."""
    if kind in (WeightKind.INT4, WeightKind.FP4_E2M1):
        halved = (*shape[:-1], shape[-1] // 2)
        return torch.randint(
            0, 256, halved, generator=noise, dtype=torch.uint8, device=noise.device
        )
    numbers = torch.empty(shape, dtype=torch.bfloat16, device=noise.device)
    numbers.normal_(0.0, _LEVEL, generator=noise).clamp_(-127, 127)
    return numbers.to(torch.int8 if kind is WeightKind.INT8 else torch.float8_e4m3fn)
