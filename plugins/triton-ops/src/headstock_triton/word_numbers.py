"""Numbers of packed maps in words whose halves lie as the left factor of tensor cores wants them.

A word of 32 bits has numbers of two columns that are beside each other in a slice, one in each half
at the same place. One or two logical operations thus make two numbers of bfloat16, and they need
not leave the registers to be multiplied. A unit of columns is as many slices as there are numbers
in a word and its neighbour.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from headstock.spi import WeightKind
from headstock_triton.device_function import device_function
from headstock_triton.portable import INTERPRETED

WORD_KINDS = {WeightKind.INT8: 0, WeightKind.INT4: 1, WeightKind.FP4_E2M1: 2}
INT8 = tl.constexpr(WORD_KINDS[WeightKind.INT8])
INT4 = tl.constexpr(WORD_KINDS[WeightKind.INT4])
FP4 = tl.constexpr(WORD_KINDS[WeightKind.FP4_E2M1])
_FOUR = tl.constexpr((tl.bfloat16,) * 4)
_EIGHT = tl.constexpr((tl.bfloat16,) * 8)
LOST_EXPONENT, INTEGER_BITS = 0x7E80, 0x4300
"""2^126 in bfloat16, by which the bits of FP4 make a number too small, and 128."""


def count_slices(kind: WeightKind) -> int:
    """Slices of a unit."""
    return 4 if kind is WeightKind.INT8 else 8


@cache
def write_code(kind: WeightKind, pairs: int) -> tuple[str, str]:
    """PTX that makes two numbers of each slice of two words, and its places.

    pairs: how many pairs of numbers of bfloat16 belong to a unit, each to as many slices
    """
    slices = count_slices(kind)
    write = {
        WeightKind.INT8: _write_int8,
        WeightKind.INT4: _write_int4,
        WeightKind.FP4_E2M1: _write_fp4,
    }[kind]
    lines = [
        line
        for number in range(slices)
        for line in write(
            number, f"${slices + number * 2 // slices}", slices + 2 + 2 * (number * pairs // slices)
        )
    ]
    places = ",".join(["=&r"] * slices + ["r"] * (2 + 2 * pairs))
    return "{ .reg .b32 t<2>; " + " ".join(lines) + " }", places


def _shift(amount: int, word: str, target: str) -> str:
    """PTX that shifts a register to the right, or to the left if the amount is negative."""
    return f"{'shr' if amount > 0 else 'shl'}.b32 {target}, {word}, {abs(amount)};"


def _write_int8(number: int, word: str, pair: int) -> list[str]:
    """The lower 7 bits + 128 less the sign's 128 + 128."""
    lines = [_shift(8, word, "t0")] if number % 2 else []
    source = "t0" if number % 2 else word
    return [
        *lines,
        f"lop3.b32 t1, {source}, 0x00800080, 0x43004300, 0xea;",
        f"lop3.b32 t0, {source}, 0x007f007f, 0x43004300, 0xea;",
        f"sub.bf16x2 ${number}, t0, t1;",
    ]


def _write_int4(number: int, word: str, pair: int) -> list[str]:
    """Numbers + 128 by one logical operation, less the zero + 128."""
    place = number % 4
    return [
        *([_shift(4 * place, word, "t0")] if place else []),
        f"lop3.b32 t0, {'t0' if place else word}, 0x000f000f, 0x43004300, 0xea;",
        f"sub.bf16x2 ${number}, t0, ${pair};",
    ]


def _write_fp4(number: int, word: str, pair: int) -> list[str]:
    """Sign, exponent and fraction as those of a tiny number, times a power of two.

    Three of the four numbers of a half lie as they do in bfloat16, but for a shift.
    """
    place = number % 4
    if place < 3:
        lines = [
            *([_shift(-3 * place, word, "t0")] if place else []),
            f"and.b32 t0, {'t0' if place else word}, 0x81c081c0;",
        ]
    else:
        lines = [_shift(-1, word, "t0"), "and.b32 t0, t0, 0x80008000;"]
        for amount, mask in ((5, "0x01000100"), (4, "0x00c000c0")):
            lines += [_shift(amount, word, "t1"), f"lop3.b32 t0, t1, {mask}, t0, 0xea;"]
    return [*lines, f"mul.bf16x2 ${number}, t0, ${pair};"]


@device_function
def _append(items, item):
    """The tuple with one more item."""
    return items + (item,)  # noqa: RUF005


@device_function
def read_pairs(extras, TILE: tl.constexpr, WORDS: tl.constexpr, GROUPS: tl.constexpr):
    """What belongs to the numbers of a unit.

    extras: pointers to the first of each row's WORDS words, which lie TILE apart: one for each of
        GROUPS groups, or of four powers of two each if GROUPS is 0
    returns: for each part of the unit what both numbers of a word are multiplied by, or what is
        subtracted, or one of anything if nothing is; and the words
    """
    pairs, words = (), ()
    for place in tl.static_range(WORDS):
        word = tl.load(extras + place * TILE)
        words = _append(words, word)
        if GROUPS == 0:
            for byte in tl.static_range(4):
                # The exponent of two numbers of bfloat16.
                pairs = _append(pairs, ((word >> (8 * byte)) & 0xFF) * 0x00800080)
        else:
            pairs = _append(pairs, (word & 0xFFFF) | (word << 16))
    if WORDS == 0:
        pairs = _append(pairs, tl.zeros(extras.shape, tl.int32))
    return pairs, words


@device_function
def read_scale(word, SHORT: tl.constexpr):
    """The upper half of a word, of bfloat16 if SHORT, else of float16, in float32."""
    if SHORT:
        return (word & -65536).to(tl.float32, bitcast=True)
    return (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@device_function
def _unpack_slice(source, pair, number: tl.constexpr, KIND: tl.constexpr, SLICE: tl.constexpr):
    """The same as the assembler code makes, for the interpreter, in float32."""
    column, share = tl.arange(0, SLICE), 2 if KIND == INT8 else 4
    word = tl.load(source + (column // 2 * 2 + number // share)[None, :])
    half = (word >> (column % 2 * 16)[None, :]) & 0xFFFF
    value = ((pair & 0xFFFF) << 16).to(tl.float32, bitcast=True)[:, None]
    if KIND == INT8:
        byte = (half >> (number % 2 * 8)) & 0xFF
        return byte.to(tl.float32) - (byte >> 7 << 8).to(tl.float32)
    if KIND == INT4:
        return ((half >> (number % 4 * 4)) & 15).to(tl.float32) + 128.0 - value
    if number % 4 < 3:
        bits = (half << (number % 4 * 3)) & 0x81C0
    else:
        bits = ((half << 1) & 0x8000) | ((half >> 5) & 0x100) | ((half >> 4) & 0xC0)
    return (bits << 16).to(tl.float32, bitcast=True) * value


def list_constants(kind: WeightKind, words: int, groups: int) -> dict[str, object]:
    """What `read_pairs` and `unpack_unit` need to know."""
    pairs = groups or 4 * words
    code, places = write_code(kind, pairs)
    return {
        "KIND": WORD_KINDS[kind],
        "SLICES": count_slices(kind),
        "WORDS": words,
        "GROUPS": groups,
        "PAIRS": pairs,
        "CODE": code,
        "PLACES": places,
    }


@device_function
def unpack_unit(
    source,
    pairs,
    KIND: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE: tl.constexpr,
    PAIRS: tl.constexpr,
    CODE: tl.constexpr,
    PLACES: tl.constexpr,
):
    """The slices of a unit, in bfloat16.

    source: pointers to the words of each row, [rows, 1]
    pairs: what belongs to PAIRS parts of the slices, [rows] each: the zero + 128, or the power of
        two that the numbers are multiplied by, in both halves; one of anything if PAIRS is 0
    CODE, PLACES: of `write_code`
    """
    if INTERPRETED:
        numbers = ()
        for number in tl.static_range(SLICES):
            pair = pairs[number * PAIRS // SLICES]
            numbers = numbers + (_unpack_slice(source, pair, number, KIND, SLICE),)  # type: ignore[assignment]  # noqa: RUF005
        return numbers
    words = tl.load(source + tl.arange(0, SLICE)[None, :])
    given = (words,)
    for pair in tl.static_range(PAIRS):
        given = given + (tl.broadcast_to(pairs[pair][:, None], words.shape),)  # type: ignore[assignment]  # noqa: RUF005
    types: tl.constexpr = _FOUR if KIND == INT8 else _EIGHT
    return tl.inline_asm_elementwise(CODE, PLACES, given, dtype=types, is_pure=True, pack=2)


def find_powers(scales: Tensor) -> tuple[Tensor, Tensor] | None:
    """Scales as exponents of bfloat16 beside the largest one of a row.

    scales: [..., outs, groups] float32
    returns: [..., outs, words] int32, four exponents in a word, and [..., outs] float32; None
        where scales are no powers of two
    """
    fractions, exponents = torch.frexp(scales)
    if not bool((fractions == 0.5).all()):
        return None
    most = exponents.amax(-1, keepdim=True)
    # Up to 2^126, as the bits of a number make it 2^126 times too small; what is below the least
    # number is nothing beside the rest of its row.
    codes = (exponents - most + 126 + 127).clamp(min=1).int()
    codes = F.pad(codes, (0, -codes.shape[-1] % 4)).unflatten(-1, (-1, 4))
    shifts = torch.arange(0, 32, 8, device=codes.device, dtype=torch.int32)
    words = (codes << shifts).sum(-1, dtype=torch.int32)
    return words, torch.ldexp(torch.ones_like(scales[..., 0]), most[..., 0] - 1)


def shorten_scales(scales: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Scales as the bits of 16, what their rows are multiplied by, and whether it is bfloat16.

    scales: [..., outs, groups] float32. Those that no type has are rounded to float16 beside
    the largest of their row, less than weights in bfloat16 are.
    """
    factors = torch.ones_like(scales[..., 0])
    for dtype in (torch.bfloat16, torch.float16):
        short = scales.to(dtype)
        if torch.equal(short.float(), scales):
            return short.view(torch.int16).int(), factors, dtype is torch.bfloat16
    most = scales.abs().amax(-1)
    factors = torch.where(most > 0, most, factors)
    short = (scales / factors[..., None]).to(torch.float16)
    return short.view(torch.int16).int(), factors, False


def _place_bits(codes: Tensor, place: int, kind: WeightKind) -> Tensor:
    """A number's bits at their place of 16.   codes: int32"""
    if kind is not WeightKind.FP4_E2M1:
        return codes << ((8 if kind is WeightKind.INT8 else 4) * place)
    sign, top, rest = codes >> 3 & 1, codes >> 2 & 1, codes & 3
    if place == 3:
        return sign << 14 | top << 13 | rest << 10
    return sign << (15 - 3 * place) | top << (8 - 3 * place) | rest << (6 - 3 * place)


def pack_words(codes: Tensor, kind: WeightKind, rows: int, slice_columns: int) -> Tensor:
    """The words of a matrix, in tiles of `rows` rows.

    codes: [outs, width] uint8, multiples of `rows` and of a unit
    returns: [outs / rows, units, rows, slice_columns] int32
    """
    slices, (outs, width) = count_slices(kind), codes.shape
    wide = codes.view(outs // rows, rows, width // (slices * slice_columns), slices, slice_columns)
    words = torch.zeros(
        *wide.shape[:3], slice_columns // 2, 2, dtype=torch.int32, device=codes.device
    )
    for number in range(slices):
        word, place = number * 2 // slices, number % (slices // 2)
        pair = _place_bits(wide[:, :, :, number].int(), place, kind).unflatten(-1, (-1, 2))
        words[..., word] |= pair[..., 0] | pair[..., 1] << 16
    return words.flatten(-2).transpose(1, 2).contiguous()
