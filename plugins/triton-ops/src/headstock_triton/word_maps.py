"""Linear maps as kernels read them: in words, by tiles of rows and units of columns."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from headstock.spi import Weight, WeightFormat, WeightKind
from headstock_triton.portable import round_to
from headstock_triton.word_numbers import (
    INTEGER_BITS,
    LOST_EXPONENT,
    WORD_KINDS,
    count_slices,
    find_powers,
    list_constants,
    pack_words,
    read_pairs,
    read_scale,
    shorten_scales,
    unpack_unit,
)

TILE_ROWS = 64
"""Rows of a tile: those of the left factor of Hopper's tensor cores."""
SLICE_COLUMNS = 32

TILE, SLICE = tl.constexpr(TILE_ROWS), tl.constexpr(SLICE_COLUMNS)


@frozen(kw_only=True, eq=False)
class WordMap(Weight):
    """A map in words; rows beyond the last are 0.

    tensor: [tiles, units, TILE_ROWS, SLICE_COLUMNS] int32
    extras: [tiles, units, words, TILE_ROWS] int32: a scale of each group in the upper half, in the
        lower one what is subtracted from INT4 or what FP4 is multiplied by; or four powers of two;
        no words of INT8
    scales: [tiles * TILE_ROWS] float32, what whole rows are multiplied by
    groups: of a unit, with a scale each; 0 for powers of two and INT8
    is_short: whether scales of groups are in bfloat16, else in float16
    counters: [tiles] int32, 0: how many parts of a tile's sums are there
    outs, width: rows and columns
    most_tokens: those of a product up to which the words are read; more take plain numbers
    """

    extras: Tensor
    groups: int
    is_short: bool
    counters: Tensor
    outs: int
    width: int
    most_tokens: int = 64

    @property
    def nbytes(self) -> int:
        """Bytes of all that it holds."""
        return super().nbytes + self.extras.nbytes + self.counters.nbytes

    @property
    def constants(self) -> dict[str, object]:
        """What a kernel needs to know to read it."""
        assert self.format is not None
        words = list_constants(self.format.kind, self.extras.shape[2], self.groups)
        return {"SHORT": self.is_short, **words}


def can_pack_map(width: int, format: WeightFormat) -> bool:
    """Whether maps of so many columns can be in words."""
    kind, group = format.kind, format.group
    if kind not in WORD_KINDS or width % (count_slices(kind) * SLICE_COLUMNS):
        return False
    rows, columns = group or (1, width)
    if rows != 1:
        return False
    if kind is WeightKind.INT4:
        return columns >= width or columns % 256 == 0 or columns in (32, 64, 128)
    if kind is WeightKind.FP4_E2M1:
        return columns == SLICE_COLUMNS
    return columns >= width and not format.has_zeros


def pack_map(weight: Weight, most_tokens: int = 64) -> WordMap | None:
    """The map in words; None where its format is not fit.

    weight: [outs, width], or half as many bytes, with a scale for each row and group
    most_tokens: as in `WordMap`
    """
    assert weight.format is not None
    assert weight.scales is not None
    assert weight.format.group is not None
    kind, columns = weight.format.kind, weight.format.group[1]
    numbers, scales = weight.tensor.view(torch.uint8), weight.scales.float()
    outs, width = numbers.shape
    if kind is not WeightKind.INT8:
        width *= 2
    if not can_pack_map(width, weight.format):
        return None
    units, groups, is_short = width // (count_slices(kind) * SLICE_COLUMNS), 0, True
    powers = find_powers(scales) if kind is WeightKind.FP4_E2M1 else None
    if kind is WeightKind.INT8:
        factors, extras = scales, numbers.new_zeros(outs, 0, dtype=torch.int32)
    elif powers is not None:
        extras, factors = powers
    else:
        halves, factors, is_short = shorten_scales(scales)
        lower: Tensor | int = LOST_EXPONENT
        if kind is WeightKind.INT4:
            lower = INTEGER_BITS + (8 if weight.zeros is None else weight.zeros.int())
        # A scale of several units is there for each of them.
        size = min(columns, width // units)
        place = torch.arange(0, width, size, device=halves.device) // columns
        extras, groups = (halves << 16 | lower)[:, place], width // units // size
    if kind is not WeightKind.INT8:
        numbers = torch.stack((numbers & 15, numbers >> 4), -1).flatten(1)
    numbers = F.pad(numbers, (0, 0, 0, -outs % TILE_ROWS))
    tensor = pack_words(numbers, kind, TILE_ROWS, SLICE_COLUMNS)
    return WordMap(
        tensor=tensor,
        extras=_cut_tiles(extras.view(outs, units, extras.shape[1] // units)),
        groups=groups,
        scales=F.pad(factors, (0, -outs % TILE_ROWS)).contiguous(),
        format=weight.format,
        bias=weight.bias,
        is_short=is_short,
        counters=tensor.new_zeros(len(tensor)),
        outs=outs,
        width=width,
        most_tokens=most_tokens,
    )


def _cut_tiles(rows: Tensor) -> Tensor:
    """[tiles, units, groups, TILE_ROWS] of [outs, units, groups]."""
    padded = F.pad(rows, (0, 0, 0, 0, 0, -len(rows) % TILE_ROWS))
    tiles: Tensor = padded.unflatten(0, (-1, TILE_ROWS))
    return tiles.permute(0, 2, 3, 1).contiguous()


@triton.jit
def unpack_words_kernel(
    words,
    extras,
    factors,
    out,
    outs,
    UNITS: tl.constexpr,
    KIND: tl.constexpr,
    SLICES: tl.constexpr,
    WORDS: tl.constexpr,
    GROUPS: tl.constexpr,
    SHORT: tl.constexpr,
    PAIRS: tl.constexpr,
    CODE: tl.constexpr,
    PLACES: tl.constexpr,
):
    """A unit of a tile's rows, as plain numbers."""
    tile, unit = tl.program_id(0), tl.program_id(1)
    r, column = tl.arange(0, TILE), tl.arange(0, SLICE)
    place = tile.to(tl.int64) * UNITS + unit
    pairs, scales = read_pairs(extras + place * (WORDS * TILE) + r, TILE, WORDS, GROUPS)
    source = words + (place * TILE + r)[:, None] * SLICE
    numbers = unpack_unit(source, pairs, KIND, SLICES, SLICE, PAIRS, CODE, PLACES)
    row = tile.to(tl.int64) * TILE + r
    factor = tl.load(factors + row)
    at = out + row[:, None] * (UNITS * SLICES * SLICE) + unit * (SLICES * SLICE) + column[None, :]
    for number in tl.static_range(SLICES):
        scale = factor
        if GROUPS > 0:
            scale *= read_scale(scales[number * GROUPS // SLICES], SHORT)
        plain = round_to(numbers[number].to(tl.float32) * scale[:, None], out.dtype.element_ty)
        tl.store(at + number * SLICE, plain, (row < outs)[:, None])


def unpack_words(weight: WordMap, dtype: torch.dtype) -> Tensor:
    """The plain numbers of a map in words.   returns: [outs, width]"""
    tiles, units = weight.tensor.shape[:2]
    out = torch.empty(weight.outs, weight.width, dtype=dtype, device=weight.tensor.device)
    unpack_words_kernel[(tiles, units)](
        weight.tensor,
        weight.extras,
        weight.scales,
        out,
        weight.outs,
        UNITS=units,
        num_warps=4,
        **weight.constants,
    )
    return out
