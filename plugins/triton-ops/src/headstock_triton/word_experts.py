"""Experts of 4 bits as kernels read them: in words, by tiles of rows and units of columns."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton.language as tl
from attrs import frozen
from torch import Tensor

from headstock.spi import Weight, WeightFormat, WeightKind
from headstock_triton.word_numbers import (
    INTEGER_BITS,
    LOST_EXPONENT,
    find_powers,
    list_constants,
    pack_words,
    shorten_scales,
)

SLICE_COLUMNS, SLICES_OF_UNIT = 16, 8
UNIT_COLUMNS = SLICE_COLUMNS * SLICES_OF_UNIT
POWER_COLUMNS = UNIT_COLUMNS // 4
"""Columns that share a power of two."""
SLICE, UNIT = tl.constexpr(SLICE_COLUMNS), tl.constexpr(UNIT_COLUMNS)

TILE_ROWS = 32
"""Rows that lie together: half of the left factor of Hopper's tensor cores, as gate and up share
one.
"""


@frozen(kw_only=True, eq=False)
class WordExperts(Weight):
    """Maps of all experts; rows and columns beyond the last are 0.

    tensor: [experts, tiles, units, TILE_ROWS, SLICE_COLUMNS] int32
    scales: [experts, tiles, TILE_ROWS] float32, of whole rows
    extras: [experts, tiles, units, words, TILE_ROWS] int32: a scale for each group of a unit in the
        upper half, in the lower one what is subtracted from integers or what FP4 is multiplied by;
        or four powers of two in one word
    groups: of a unit, with a scale each; 0 for powers of two
    is_short: whether scales of groups are in bfloat16, else in float16
    outs, width: rows and columns
    """

    extras: Tensor
    groups: int
    is_short: bool
    outs: int
    width: int

    @property
    def nbytes(self) -> int:
        """See `Weight.nbytes`."""
        return super().nbytes + self.extras.nbytes

    @property
    def constants(self) -> dict[str, object]:
        """What a kernel needs to know to read it."""
        assert self.format is not None
        words = list_constants(self.format.kind, self.extras.shape[3], self.groups)
        return {"SHORT": self.is_short, **words}


def can_pack(width: int, format: WeightFormat) -> bool:
    """Whether experts of so many columns can be in words."""
    if format.group is None or format.kind not in (WeightKind.INT4, WeightKind.FP4_E2M1):
        return False
    rows, columns = format.group
    least = POWER_COLUMNS if format.has_zeros else SLICE_COLUMNS
    is_fit = columns >= width or columns % UNIT_COLUMNS == 0 or UNIT_COLUMNS % columns == 0
    return (
        rows == 1
        and is_fit
        and columns >= least
        and width % SLICE_COLUMNS == 0
        and (format.kind is WeightKind.INT4 or not format.has_zeros)
    )


def pack_experts(weight: Weight) -> WordExperts:
    """The experts in words.   weight: in a format of `can_pack`, [experts, outs, width / 2]"""
    assert weight.scales is not None
    assert weight.format is not None
    assert weight.format.group is not None
    _, outs, half = weight.tensor.shape
    is_fp4, columns = weight.format.kind is WeightKind.FP4_E2M1, weight.format.group[1]
    scales, size = weight.scales.float(), min(columns, UNIT_COLUMNS)
    powers = find_powers(scales) if is_fp4 and columns == POWER_COLUMNS else None
    is_short = True
    if powers is not None:
        extras, factors, size = *powers, UNIT_COLUMNS
    else:
        halves, factors, is_short = shorten_scales(scales)
        lower = torch.full_like(halves, LOST_EXPONENT if is_fp4 else INTEGER_BITS + 8)
        if weight.zeros is not None:
            lower = INTEGER_BITS + weight.zeros.int()
        place = torch.arange(0, 2 * half, size, device=halves.device) // columns
        extras = (halves << 16 | lower)[..., place]
    words = UNIT_COLUMNS // size
    extras = _pad(extras, TILE_ROWS, words).unflatten(-1, (-1, words))
    return WordExperts(
        tensor=torch.stack([_pack_expert(each, weight.format.kind) for each in weight.tensor]),
        scales=_pad(factors[..., None], TILE_ROWS, 1).view(len(factors), -1, TILE_ROWS),
        extras=extras.unflatten(1, (-1, TILE_ROWS)).permute(0, 1, 3, 4, 2).contiguous(),
        format=weight.format,
        bias=weight.bias,
        groups=0 if powers is not None else words,
        is_short=is_short,
        outs=outs,
        width=2 * half,
    )


def _pad(rows: Tensor, outs: int, columns: int) -> Tensor:
    """[..., rows, columns] with 0 up to multiples of both."""
    return F.pad(rows, (0, -rows.shape[-1] % columns, 0, -rows.shape[-2] % outs))


def _pack_expert(numbers: Tensor, kind: WeightKind) -> Tensor:
    """The words of an expert; one by one, as what is between takes several times the numbers."""
    codes = torch.stack((numbers & 15, numbers >> 4), -1).flatten(-2)
    return pack_words(_pad(codes, TILE_ROWS, UNIT_COLUMNS), kind, TILE_ROWS, SLICE_COLUMNS)
