"""Numbers of 4 bits in words whose halves lie as the left factor of tensor cores wants them.

A word of 32 bits has two numbers that are beside each other in a slice of `SLICE` columns, one in
each half at the same place. One logical operation thus makes two numbers of bfloat16, and they need
not leave the registers to be multiplied. A unit of columns is `SLICES` slices.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from headstock_triton.device_function import device_function
from headstock_triton.portable import INTERPRETED

SLICE_COLUMNS, SLICES_OF_UNIT = 16, 8
UNIT_COLUMNS = SLICE_COLUMNS * SLICES_OF_UNIT
POWER_COLUMNS = UNIT_COLUMNS // 4
"""Columns that share a power of two."""

SLICE, SLICES = tl.constexpr(SLICE_COLUMNS), tl.constexpr(SLICES_OF_UNIT)
UNIT = tl.constexpr(UNIT_COLUMNS)


def _shift(amount: int, source: str, target: str) -> str:
    """PTX that shifts a register to the right, or to the left if the amount is negative."""
    return f"{'shr' if amount > 0 else 'shl'}.b32 {target}, {source}, {abs(amount)};"


def _write_integers() -> str:
    """Numbers + 128 by one logical operation, less the zero + 128."""
    lines = []
    for number in range(SLICES_OF_UNIT):
        word, place, half = f"${8 + number // 4}", number % 4, f"t{number}"
        if place:
            lines.append(_shift(4 * place, word, half))
        source = half if place else word
        lines.append(f"lop3.b32 {half}, {source}, 0x000f000f, 0x43004300, 0xea;")
        lines.append(f"sub.bf16x2 ${number}, {half}, ${10 + 2 * (number // 2)};")
    return "{ .reg .b32 t<8>; " + " ".join(lines) + " }"


def _write_fp4() -> str:
    """Sign, exponent and fraction as those of a tiny number, times a power of two.

    Three of the four numbers of a half lie as they do in bfloat16, but for a shift.
    """
    lines = []
    for number in range(SLICES_OF_UNIT):
        word, place, half = f"${8 + number // 4}", number % 4, f"t{number}"
        if place == 0:
            lines.append(f"and.b32 {half}, {word}, 0x81c081c0;")
        elif place < 3:
            lines.append(_shift(-3 * place, word, half))
            lines.append(f"and.b32 {half}, {half}, 0x81c081c0;")
        else:
            lines.append(_shift(-1, word, half))
            lines.append(f"and.b32 {half}, {half}, 0x80008000;")
            for amount, mask in ((5, "0x01000100"), (4, "0x00c000c0")):
                lines.append(_shift(amount, word, "t8"))
                lines.append(f"lop3.b32 {half}, t8, {mask}, {half}, 0xea;")
        lines.append(f"mul.bf16x2 ${number}, {half}, ${10 + 2 * (number // 2)};")
    return "{ .reg .b32 t<9>; " + " ".join(lines) + " }"


_INTEGER_CODE, _FP4_CODE = tl.constexpr(_write_integers()), tl.constexpr(_write_fp4())
_PLACES = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 10))
_TYPES = tl.constexpr((tl.bfloat16,) * SLICES_OF_UNIT)


@device_function
def _append(items, item):
    """The tuple with one more item."""
    return items + (item,)  # noqa: RUF005


@device_function
def read_pairs(extras, TILE: tl.constexpr, GROUPS: tl.constexpr):
    """What belongs to the numbers of a unit.

    extras: pointers to the first word of each row; of GROUPS words TILE apart, or of one for 0
    returns: for each quarter of the unit what both numbers of a word are multiplied by, or what is
        subtracted; and the words
    """
    pairs, words = (), ()
    if GROUPS == 0:
        word = tl.load(extras)
        for byte in tl.static_range(4):
            # The exponent of two numbers of bfloat16.
            pairs = _append(pairs, ((word >> (8 * byte)) & 0xFF) * 0x00800080)
    else:
        for group in tl.static_range(GROUPS):
            words = _append(words, tl.load(extras + group * TILE))
        for quarter in tl.static_range(4):
            word = words[quarter * GROUPS // 4]
            pairs = _append(pairs, (word & 0xFFFF) | (word << 16))
    return pairs, words


@device_function
def read_scale(word, SHORT: tl.constexpr):
    """The upper half of a word, of bfloat16 if SHORT, else of float16, in float32."""
    if SHORT:
        return (word & -65536).to(tl.float32, bitcast=True)
    return (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@device_function
def _widen_column(column, like):
    return tl.broadcast_to(column[:, None], like.shape)


@device_function
def _unpack_slice(source, pair, number: tl.constexpr, FP4: tl.constexpr):
    """The same as the assembler code makes, for the interpreter, in float32."""
    column = tl.arange(0, SLICE)
    word = tl.load(source + (column // 2 * 2 + number // 4)[None, :])
    half = (word >> (column % 2 * 16)[None, :]) & 0xFFFF
    value = ((pair & 0xFFFF) << 16).to(tl.float32, bitcast=True)[:, None]
    if not FP4:
        return ((half >> (number % 4 * 4)) & 15).to(tl.float32) + 128.0 - value
    if number % 4 < 3:
        bits = (half << (number % 4 * 3)) & 0x81C0
    else:
        bits = ((half << 1) & 0x8000) | ((half >> 5) & 0x100) | ((half >> 4) & 0xC0)
    return (bits << 16).to(tl.float32, bitcast=True) * value


@device_function
def unpack_unit(source, pairs, FP4: tl.constexpr):
    """The slices of a unit in bfloat16.   source: pointers to the words of each row, [rows, 1]"""
    if INTERPRETED:
        numbers = ()
        for number in tl.static_range(SLICES):
            numbers = _append(numbers, _unpack_slice(source, pairs[number // 2], number, FP4))
        return numbers
    words = tl.load(source + tl.arange(0, SLICE)[None, :])
    return tl.inline_asm_elementwise(
        _FP4_CODE if FP4 else _INTEGER_CODE,
        _PLACES,
        [
            words,
            _widen_column(pairs[0], words),
            _widen_column(pairs[1], words),
            _widen_column(pairs[2], words),
            _widen_column(pairs[3], words),
        ],
        dtype=_TYPES,
        is_pure=True,
        pack=2,
    )


def _place_bits(codes: Tensor, place: int, *, is_fp4: bool) -> Tensor:
    """A number's bits at their place of 16.   codes: int32"""
    if not is_fp4:
        return codes << (4 * place)
    sign, top, rest = codes >> 3 & 1, codes >> 2 & 1, codes & 3
    if place == 3:
        return sign << 14 | top << 13 | rest << 10
    return sign << (15 - 3 * place) | top << (8 - 3 * place) | rest << (6 - 3 * place)


def pack_words(codes: Tensor, rows: int, *, is_fp4: bool) -> Tensor:
    """The words of a matrix, in tiles of `rows` rows.

    codes: [outs, width] uint8 below 16, multiples of `rows` and of a unit
    returns: [outs / rows, width / UNIT_COLUMNS, rows, SLICE_COLUMNS] int32
    """
    outs, width = codes.shape
    wide = codes.view(outs // rows, rows, width // UNIT_COLUMNS, SLICES_OF_UNIT, SLICE_COLUMNS)
    words = torch.zeros(
        *wide.shape[:3], SLICE_COLUMNS // 2, 2, dtype=torch.int32, device=codes.device
    )
    for number in range(SLICES_OF_UNIT):
        pair = _place_bits(wide[:, :, :, number].int(), number % 4, is_fp4=is_fp4)
        pair = pair.unflatten(-1, (-1, 2))
        words[..., number // 4] |= pair[..., 0] | pair[..., 1] << 16
    return words.flatten(-2).transpose(1, 2).contiguous()
