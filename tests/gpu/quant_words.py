"""Products of a few tokens by quantized weights whose words are in the order of the tensor cores.

A word of 32 bits has numbers that are consecutive columns of one slice in its two halves, so that
one logical operation makes two numbers of bfloat16 of them. The slices of a unit of inputs are
multiplied one after another. The left factor thus never leaves the registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen
from quant_packing import Words

from headstock_triton.device_function import device_function
from headstock_triton.pdl import begin_next, launch_options, wait_for_previous
from headstock_triton.portable import INTERPRETED, add_product, round_to

FORMATS = {"fp8": 0, "int4": 1, "mxfp4": 2}
FP8 = tl.constexpr(FORMATS["fp8"])
INT4 = tl.constexpr(FORMATS["int4"])
MXFP4 = tl.constexpr(FORMATS["mxfp4"])


def _shift(amount: int, source: int, target: int) -> str:
    """PTX that shifts a register to the right, or to the left if the amount is negative."""
    name = "shr" if amount > 0 else "shl"
    return f"{name}.b32 t{target}, ${source}, {abs(amount)};"


def _write_int4() -> str:
    """Numbers + 128 by one logical operation, from which the zero + 128 is subtracted."""
    lines = []
    for slice in range(8):
        word, place = 8 + slice // 4, slice % 4
        if place:
            lines.append(_shift(4 * place, word, slice))
        source = f"t{slice}" if place else f"${word}"
        lines.append(f"lop3.b32 t{slice}, {source}, 0x000f000f, 0x43004300, 0xea;")
        lines.append(f"sub.bf16x2 ${slice}, t{slice}, ${10 + 2 * (slice // 2)};")
    return "{ .reg .b32 t<8>; " + " ".join(lines) + " }"


def _write_mxfp4() -> str:
    """Sign, exponent and fraction as those of a tiny number, times a power of two.

    Three of the four numbers of a half lie as they do in bfloat16, but for a shift.
    """
    lines = []
    for slice in range(8):
        word, place = 8 + slice // 4, slice % 4
        if place == 0:
            lines.append(f"and.b32 t{slice}, ${word}, 0x81c081c0;")
        elif place < 3:
            lines.append(_shift(-3 * place, word, slice))
            lines.append(f"and.b32 t{slice}, t{slice}, 0x81c081c0;")
        else:
            lines.append(_shift(-1, word, slice))
            lines.append(f"and.b32 t{slice}, t{slice}, 0x80008000;")
            lines.append(_shift(5, word, 8))
            lines.append(f"lop3.b32 t{slice}, t8, 0x01000100, t{slice}, 0xea;")
            lines.append(_shift(4, word, 8))
            lines.append(f"lop3.b32 t{slice}, t8, 0x00c000c0, t{slice}, 0xea;")
        lines.append(f"mul.bf16x2 ${slice}, t{slice}, ${10 + 2 * slice};")
    return "{ .reg .b32 t<9>; " + " ".join(lines) + " }"


def _write_fp8() -> str:
    """Sign, exponent and fraction as those of a tiny number, times 2^120."""
    lines = []
    for slice in range(4):
        word, place = 4 + slice // 2, slice % 2
        sign = f"${word}"
        if place:
            lines.append(f"shl.b32 t5, ${word}, 8;")
            sign = "t5"
        lines.append(f"shr.b32 t{slice}, {sign}, 4;")
        lines.append(f"and.b32 t{slice}, t{slice}, 0x07f007f0;")
        lines.append(f"lop3.b32 t{slice}, {sign}, 0x80008000, t{slice}, 0xea;")
        lines.append(f"mul.bf16x2 ${slice}, t{slice}, t4;")
    return "{ .reg .b32 t<6>; mov.b32 t4, 0x7b807b80; " + " ".join(lines) + " }"


INT4_CODE = tl.constexpr(_write_int4())
MXFP4_CODE = tl.constexpr(_write_mxfp4())
FP8_CODE = tl.constexpr(_write_fp8())
INT4_PLACES = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 10))
MXFP4_PLACES = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 18))
FP8_PLACES = tl.constexpr(",".join(["=&r"] * 4 + ["r"] * 2))
EIGHT = tl.constexpr((tl.bfloat16,) * 8)
FOUR = tl.constexpr((tl.bfloat16,) * 4)


@device_function
def _wide(column, ROWS: tl.constexpr, J: tl.constexpr):
    """[ROWS] as [ROWS, J]"""
    return tl.broadcast_to(column[:, None], (ROWS, J))


@device_function
def _zero_pair(pair):
    """The lower half of a word in both of its halves."""
    return (pair & 0xFFFF) | (pair << 16)


@device_function
def _power_pair(powers, place: tl.constexpr):
    """A byte of a word as the exponent of two numbers of bfloat16."""
    return ((powers >> (8 * place)) & 0xFF) * 0x800080


@device_function
def _prefetch(source, size):
    """Ask the second-level cache for `size` bytes, a multiple of 16."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            """{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;
            @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }""",
            "=r,l,r",
            [source, size],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@device_function
def _code(source, j, number: tl.constexpr, FORMAT: tl.constexpr):
    """The stored bits of a slice's numbers, for the interpreter.   source: the words of a row"""
    if FORMAT == FP8:
        word = tl.load(source + (j // 2 * 2 + number // 2)[None, :])
        return (word >> (j % 2 * 16 + 8 - number % 2 * 8)[None, :]) & 0xFF
    half = tl.load(source + (j // 2 * 2 + number // 4)[None, :]) >> (j % 2 * 16)[None, :]
    if FORMAT == INT4:
        return (half >> (number % 4 * 4)) & 15
    if number % 4 < 3:
        return (half << (number % 4 * 3)) & 0x81C0
    return ((half << 1) & 0x8000) | ((half >> 5) & 0x100) | ((half >> 4) & 0xC0)


@device_function
def _number(code, extra, FORMAT: tl.constexpr):
    """The same as the assembler code makes of the bits, for the interpreter, in float32."""
    if FORMAT == INT4:
        zero = (extra << 16).to(tl.float32, bitcast=True)
        return code.to(tl.float32) + 128.0 - zero
    if FORMAT == MXFP4:
        return (code << 16).to(tl.float32, bitcast=True) * (extra << 16).to(
            tl.float32, bitcast=True
        )
    tiny = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    return tiny.to(tl.float32, bitcast=True) * 2.0**120


@triton.jit(do_not_specialize=("tokens",))
def words_kernel(
    x,
    words,
    extras,
    factors,
    parts,
    out,
    counters,
    tokens,
    outs,
    UNITS: tl.constexpr,
    FORMAT: tl.constexpr,
    J: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    FINISH: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of rows of the weight with all tokens, and one of PARTS parts of the inputs.

    words: [tiles, units, ROWS, J]    extras: [tiles, units, groups, ROWS], zeros and scales
    factors: [outs] float32    parts: [PARTS, tokens, outs] float32    counters: [tiles], 0
    FINISH: 0 writes the sum of the only part to out, 1 writes the parts, 2 adds them in order
    PREFETCH: the second-level cache is asked for all of the program's words before it waits
    """
    begin_next(PDL)
    slices: tl.constexpr = 4 if FORMAT == FP8 else 8
    size: tl.constexpr = slices * J
    width: tl.constexpr = size * UNITS * PARTS
    groups: tl.constexpr = size // 128
    tile, part = tl.program_id(0), tl.program_id(1)
    r, j, token = tl.arange(0, ROWS), tl.arange(0, J), tl.arange(0, TOKENS)
    first = tile * (UNITS * PARTS) + part * UNITS
    source = words + first.to(tl.int64) * (ROWS * J) + r[:, None] * J
    extra_source = extras + first * (groups * ROWS) + r
    inside = (token < tokens)[:, None]
    values = x + token[:, None] * width + part * (UNITS * size) + j[None, :]
    if PREFETCH:
        _prefetch(words + first.to(tl.int64) * (ROWS * J), UNITS * ROWS * J * 4)
    wait_for_previous(PDL)
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    for unit in tl.range(0, UNITS, num_stages=STAGES):
        place = source + unit * (ROWS * J)
        extra_place = extra_source + unit * (groups * ROWS)
        pairs, scales = (), ()
        if FORMAT == INT4:
            for group in tl.static_range(groups):
                extra = tl.load(extra_place + group * ROWS)
                pairs = pairs + (_zero_pair(extra),)  # noqa: RUF005
                scales = scales + (((extra >> 16) << 16).to(tl.float32, bitcast=True),)  # noqa: RUF005
        if FORMAT == MXFP4:
            for group in tl.static_range(groups):
                extra = tl.load(extra_place + group * ROWS)
                for byte in tl.static_range(4):
                    pairs = pairs + (_power_pair(extra, byte),)  # noqa: RUF005
        if not INTERPRETED:
            w = tl.load(place + j[None, :])
            if FORMAT == FP8:
                numbers = tl.inline_asm_elementwise(
                    FP8_CODE, FP8_PLACES, [w], dtype=FOUR, is_pure=True, pack=2
                )
            elif FORMAT == INT4:
                numbers = tl.inline_asm_elementwise(
                    INT4_CODE,
                    INT4_PLACES,
                    [
                        w,
                        _wide(pairs[0], ROWS, J),
                        _wide(pairs[groups // 4], ROWS, J),
                        _wide(pairs[groups // 2], ROWS, J),
                        _wide(pairs[groups // 4 * 3 if groups > 2 else groups // 2], ROWS, J),
                    ],
                    dtype=EIGHT,
                    is_pure=True,
                    pack=2,
                )
            else:
                numbers = tl.inline_asm_elementwise(
                    MXFP4_CODE,
                    MXFP4_PLACES,
                    [
                        w,
                        _wide(pairs[0], ROWS, J),
                        _wide(pairs[groups // 2], ROWS, J),
                        _wide(pairs[groups], ROWS, J),
                        _wide(pairs[groups * 3 // 2], ROWS, J),
                        _wide(pairs[groups * 2], ROWS, J),
                        _wide(pairs[groups * 5 // 2], ROWS, J),
                        _wide(pairs[groups * 3], ROWS, J),
                        _wide(pairs[groups * 7 // 2], ROWS, J),
                    ],
                    dtype=EIGHT,
                    is_pure=True,
                    pack=2,
                )
        product = sums
        if FORMAT == INT4:
            product = tl.zeros((ROWS, TOKENS), tl.float32)
        for number in tl.static_range(slices):
            value = tl.load(values + unit * size + number * J, inside, other=0.0)
            if INTERPRETED:
                extra = r
                if FORMAT == INT4:
                    extra = pairs[number * J // 128]
                if FORMAT == MXFP4:
                    extra = pairs[number * J // 32]
                left = _number(_code(place, j, number, FORMAT), extra[:, None], FORMAT)
                product = add_product(left, value.T, product)
            else:
                product = add_product(numbers[number], value.T, product)
            if FORMAT == INT4 and (number + 1) * J % 128 == 0:
                sums += product * scales[number * J // 128][:, None]
                product = tl.zeros((ROWS, TOKENS), tl.float32)
        if FORMAT != INT4:
            sums = product
    row = tile * ROWS + r
    if FORMAT != INT4:
        sums *= tl.load(factors + row)[:, None]
    at = token[None, :] * outs + row[:, None]
    there = tl.broadcast_to((token < tokens)[None, :], (ROWS, TOKENS))
    if FINISH == 0:
        tl.store(out + at, round_to(sums, out.dtype.element_ty), there)
    else:
        whole = tokens * outs
        tl.store(parts + part * whole + at, sums, there)
        if FINISH == 2:
            tl.debug_barrier()
            if tl.atomic_add(counters + tile, 1, sem="acq_rel") == PARTS - 1:
                total = tl.zeros((ROWS, TOKENS), tl.float32)
                for each in tl.static_range(PARTS):
                    total += tl.load(parts + each * whole + at, there, 0.0, cache_modifier=".cg")
                tl.store(out + at, round_to(total, out.dtype.element_ty), there)
                tl.store(counters + tile, 0)


@frozen(kw_only=True)
class WordTile:
    """How a product of words is cut.

    finish: 0 for one part, 1 leaves the parts to a later kernel, 2 adds them in the last program
    """

    j: int = 32
    rows: int = 64
    parts: int = 1
    finish: int = 0
    warps: int = 4
    stages: int = 4
    least_tokens: int = 8
    prefetch: bool = False
    pdl: bool = False


def count_tokens(tokens: int, tile: WordTile) -> int:
    """Tokens of a tile."""
    return max(tile.least_tokens, triton.next_power_of_2(tokens))


def _fix(format: str, width: int, tokens: int, tile: WordTile) -> dict[str, object]:
    """The constants and options of a launch."""
    unit = (4 if format == "fp8" else 8) * tile.j
    units = width // (unit * tile.parts)
    assert units * unit * tile.parts == width, "parts do not divide the units"
    return {
        "UNITS": units,
        "FORMAT": FORMATS[format],
        "J": tile.j,
        "ROWS": tile.rows,
        "TOKENS": count_tokens(tokens, tile),
        "PARTS": tile.parts,
        "FINISH": tile.finish,
        "STAGES": tile.stages,
        "PREFETCH": tile.prefetch,
        "num_warps": tile.warps,
        **launch_options(tile.pdl),
    }


def compile_words(format: str, outs: int, width: int, tokens: int, tile: WordTile) -> None:
    """Compile what `multiply_words` launches."""
    word, number = torch.int32, torch.float32
    parts = number if tile.finish else torch.bfloat16
    words_kernel.warmup(
        torch.bfloat16,
        word,
        word,
        number,
        parts,
        torch.bfloat16,
        word,
        tokens,
        outs,
        grid=(1,),
        **_fix(format, width, tokens, tile),
    )


def multiply_words(
    x: torch.Tensor, weight: Words, tile: WordTile, counters: torch.Tensor
) -> torch.Tensor:
    """x W^T.   x: [tokens, width] bfloat16, up to 64    returns: [tokens, outs], or the parts"""
    tokens, width = x.shape
    out = x.new_empty(tokens, weight.outs)
    parts = out
    if tile.finish:
        parts = x.new_empty(tile.parts, tokens, weight.outs, dtype=torch.float32)
    words_kernel[(weight.outs // tile.rows, tile.parts)](
        x,
        weight.words,
        weight.extras,
        weight.factors,
        parts,
        out,
        counters,
        tokens,
        weight.outs,
        **_fix(weight.format, width, tokens, tile),
    )
    return parts if tile.finish == 1 else out
