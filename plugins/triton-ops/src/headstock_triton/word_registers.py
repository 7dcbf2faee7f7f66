"""Products of a few tokens with maps in words, which go from memory to registers.

`word_linear` shares words and tokens among the warps of a program, and each of its steps waits for
both. Here a warp loads what its own tensor-core instructions take, a step ahead, and waits for no
other until it ends. Triton chooses no such layouts, so the kernel is written in Gluon, its language
with layouts by hand. The norm before a product of one token and the sum after it are parts of its
kernel, as in `linear`.
"""

from __future__ import annotations

import triton
from attrs import frozen
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from headstock.spi import WeightKind
from headstock_triton.pdl import launch_options
from headstock_triton.portable import INTERPRETED
from headstock_triton.tiles import is_hopper
from headstock_triton.word_maps import SLICE, TILE, WordMap
from headstock_triton.word_tokens import (
    begin_next,
    load_tokens,
    read_staged,
    stage_normed,
    wait_for_previous,
)

MOST_TOKENS = 8
"""The tokens of one instruction."""
KINDS = frozenset((WeightKind.INT4, WeightKind.FP4_E2M1))
"""Formats of which these products are faster."""
MOST_WARPS = 2112
"""Sixteen for each processor of an H200: as many as have registers there."""
FEW_WARPS = 528
"""Four for each processor: a product with no more takes another warp in any case."""
MOST_WARP_WIDTH = 2048
"""Columns of a token that a warp normalizes in its registers."""
LEAST_STEPS = 4
"""Units of a warp, with which loading a step ahead gains more than another warp."""

_FOUR = gl.constexpr((gl.bfloat16,) * 4)
_EIGHT = gl.constexpr((gl.bfloat16,) * 8)


@frozen(kw_only=True)
class WarpTile:
    """Rows of the weight that a program takes, and the warps that share its columns.

    registers: the most of a thread; None leaves them to the compiler
    """

    rows: int
    warps: int
    registers: int | None = None


def choose_warp_tile(outs: int, units: int, least: int = 1) -> WarpTile:
    """The tile of a product with `outs` rows of so many units, which the warps divide.

    least: warps that it has at least; a power of two up to 8 that divides the units
    """
    blocks = triton.cdiv(outs, 16)
    for warps in (8, 4, 2):
        most = MOST_WARPS if units >= warps * LEAST_STEPS else FEW_WARPS
        if warps >= least and units % warps == 0 and blocks * warps <= most:
            return WarpTile(rows=16, warps=warps)
    # A warp with two blocks of rows loads tokens once for both. It would take 172 registers, with
    # which a processor has room for ten warps in place of twelve, and those of 8B run in two turns.
    return WarpTile(rows=32, warps=max(least, 2 if units % 2 == 0 else 1), registers=168)


def count_norm_warps(weight: WordMap) -> int | None:
    """The fewest warps whose threads have room to normalize a token; None where none divide it."""
    units = weight.tensor.shape[1]
    fit = (n for n in (1, 2, 4, 8) if units % n == 0 and weight.width <= n * MOST_WARP_WIDTH)
    return next(fit, None)


def takes_registers(x: Tensor, weight: WordMap) -> bool:
    """Whether a product is faster by this kernel, on the devices where it was measured."""
    assert weight.format is not None
    is_few = 0 < len(x) <= MOST_TOKENS and weight.format.kind in KINDS
    return is_few and not INTERPRETED and is_hopper(x.device)


@gluon.jit
def _find_rows(block_row, outs, ROWS: gl.constexpr, GATED: gl.constexpr):
    """The rows of the weight of a program's tile; `outs` or more where there is none.

    GATED: eight rows of gate and their eight of up alternate, so that a thread has both
    """
    if GATED:
        inner = gl.program_id(0) * (ROWS // 2) + block_row // 16 * 8 + block_row % 8
        return gl.where(inner < outs // 2, inner + block_row // 8 % 2 * (outs // 2), outs)
    return gl.program_id(0) * ROWS + block_row


@gluon.jit
def _load_extras(extra, unit, WORDS: gl.constexpr):
    found = ()
    for number in gl.static_range(WORDS):
        found = found + (gl.load(extra + (unit * WORDS + number) * TILE),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def _unpack(
    words,
    extras,
    SLICES: gl.constexpr,
    GROUPS: gl.constexpr,
    CODE: gl.constexpr,
    PLACES: gl.constexpr,
):
    """The slices of a unit, in bfloat16: as `word_numbers.unpack_unit`."""
    given = (words,)
    none = gl.zeros_like(words)
    for place in gl.static_range(len(extras)):
        word = extras[place]
        if GROUPS == 0:
            for byte in gl.static_range(4):
                power = ((word >> (8 * byte)) & 0xFF) * 0x00800080
                given = given + (gl.expand_dims(power, 2) | none,)  # type: ignore[assignment]  # noqa: RUF005
        else:
            zero = (word & 0xFFFF) | (word << 16)
            given = given + (gl.expand_dims(zero, 2) | none,)  # type: ignore[assignment]  # noqa: RUF005
    types: gl.constexpr = _FOUR if SLICES == 4 else _EIGHT
    return gl.inline_asm_elementwise(CODE, PLACES, given, dtype=types, is_pure=True, pack=2)


@gluon.jit
def _read_scale(word, SHORT: gl.constexpr):
    """As `word_numbers.read_scale`."""
    if SHORT:
        return (word & -65536).to(gl.float32, bitcast=True)
    return (word >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit(do_not_specialize=("tokens",))
def few_words_kernel(
    x,
    words,
    extras,
    factors,
    bias,
    norm,
    total,
    out,
    tokens,
    outs,
    eps,
    UNITS: gl.constexpr,
    KIND: gl.constexpr,
    SLICES: gl.constexpr,
    WORDS: gl.constexpr,
    GROUPS: gl.constexpr,
    SHORT: gl.constexpr,
    PAIRS: gl.constexpr,
    CODE: gl.constexpr,
    PLACES: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    WARPS: gl.constexpr,
    BIAS: gl.constexpr,
    GATED: gl.constexpr,
    NORM: gl.constexpr,
    ADD: gl.constexpr,
    PDL: gl.constexpr,
):
    """A tile of rows of the weight with all tokens; each warp takes a part of its units.

    NORM: the only token is normalized first. GATED: rows of gate and up give silu(gate) * up. ADD:
    the outputs are added to `total` in place, whose numbers no other program reads.

    Every step is rounded as the torch operations round it.
    """
    # Eight numbers beside each other in a thread, of both factors: loads of 16 bytes.
    sums_of: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8]
    )
    left: gl.constexpr = gl.DotOperandLayout(0, sums_of, 8)
    right: gl.constexpr = gl.DotOperandLayout(1, sums_of, 8)
    size: gl.constexpr = SLICES * SLICE
    steps: gl.constexpr = UNITS // WARPS
    begin_next(PDL)
    of_rows: gl.constexpr = gl.SliceLayout(2, left)
    row = _find_rows(gl.arange(0, ROWS, gl.SliceLayout(0, of_rows)), outs, ROWS, GATED)
    # Rows past the end read the last one again, so that loads need no mask for them.
    near = gl.minimum(row, outs - 1)
    first = gl.arange(0, WARPS, gl.SliceLayout(1, of_rows)) * steps
    place = (near // TILE).to(gl.int64)[None, :] * UNITS + first[:, None]
    inside = (near % TILE)[None, :]
    column = gl.arange(0, SLICE, gl.SliceLayout(0, gl.SliceLayout(1, left)))
    source = words + ((place * TILE + inside) * SLICE)[:, :, None] + column[None, None, :]
    extra = extras + place * (WORDS * TILE) + inside
    of_columns: gl.constexpr = gl.SliceLayout(2, right)
    start = gl.arange(0, WARPS, gl.SliceLayout(1, of_columns)) * (steps * size)
    at = start[:, None] + gl.arange(0, SLICE, gl.SliceLayout(0, of_columns))[None, :]
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(1, right)))
    # Tokens past the end are the last one again, alike.
    values = x + gl.minimum(token, tokens - 1)[None, None, :] * (UNITS * size) + at[:, :, None]
    given = gl.load(source, eviction_policy="evict_first")
    found = _load_extras(extra, 0, WORDS)
    none = gl.zeros([WARPS, SLICE, TOKENS], gl.int16, right)
    if NORM:
        staged = stage_normed(x, norm, eps, steps * SLICES, WARPS, SLICE, PDL)
        value = ()
    else:
        wait_for_previous(PDL)
        value = load_tokens(values, 0, SLICES, SLICE)
    sums = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, sums_of)
    old = _load_old(total, tokens, outs, sums, ADD)
    for unit in range(steps):
        following = gl.minimum(unit + 1, steps - 1)
        next_given = gl.load(source + following * (TILE * SLICE), eviction_policy="evict_first")
        next_found = _load_extras(extra, following, WORDS)
        next_value = value
        if not NORM:
            next_value = load_tokens(values, following, SLICES, SLICE)
        numbers = _unpack(given, found, SLICES, GROUPS, CODE, PLACES)
        product = sums
        if GROUPS > 0:
            product = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, sums_of)
        for number in gl.static_range(SLICES):
            if NORM:
                piece = read_staged(staged, unit * SLICES + number, none, right)
            else:
                piece = value[number]
            product = mma_v2(numbers[number], piece, product)
            if GROUPS > 0 and (number + 1) * GROUPS % SLICES == 0:
                scale = _read_scale(found[number * GROUPS // SLICES], SHORT)
                scale = gl.convert_layout(scale, gl.SliceLayout(2, sums_of))
                sums += product * scale[:, :, None]
                product = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, sums_of)
        if GROUPS == 0:
            sums = product
        given, found, value = next_given, next_found, next_value
    _store(gl.sum(sums, 0), old, factors, bias, out, tokens, outs, BIAS, GATED, ADD)


@gluon.jit
def _load_old(total, tokens, outs, sums, ADD: gl.constexpr):
    """What a tile's sums are added to, or 0.   sums: [warps, rows, tokens]"""
    layout: gl.constexpr = gl.SliceLayout(0, sums.type.layout)
    row = gl.program_id(0) * sums.shape[1]
    row += gl.arange(0, sums.shape[1], gl.SliceLayout(1, layout))
    token = gl.arange(0, sums.shape[2], gl.SliceLayout(0, layout))
    there = (row < outs)[:, None] & (token < tokens)[None, :]
    old = gl.zeros([sums.shape[1], sums.shape[2]], gl.float32, layout)
    if ADD:
        old = gl.load(total + token[None, :] * outs + row[:, None], there, other=0.0).to(gl.float32)
    return old


@gluon.jit
def _store(
    whole,
    old,
    factors,
    bias,
    out,
    tokens,
    outs,
    BIAS: gl.constexpr,
    GATED: gl.constexpr,
    ADD: gl.constexpr,
):
    """Write a tile's sums.   whole, old: [rows, tokens]"""
    layout: gl.constexpr = whole.type.layout
    rows: gl.constexpr = whole.shape[0]
    seats: gl.constexpr = whole.shape[1]
    row = _find_rows(gl.arange(0, rows, gl.SliceLayout(1, layout)), outs, rows, GATED)
    near = gl.minimum(row, outs - 1)
    whole *= gl.load(factors + near)[:, None]
    if BIAS:
        whole += gl.load(bias + near).to(gl.float32)[:, None]
    dtype: gl.constexpr = out.dtype.element_ty
    if GATED:
        pairs = gl.permute(gl.reshape(whole, [rows // 16, 2, 8, seats]), (0, 2, 3, 1))
        gate, up = gl.split(pairs)
        gate = gate.to(dtype).to(gl.float32)
        silu = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32)
        result = (silu * up.to(dtype).to(gl.float32)).to(dtype)
        of_result: gl.constexpr = result.type.layout
        block = gl.arange(0, rows // 16, gl.SliceLayout(1, gl.SliceLayout(2, of_result)))
        line = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, of_result)))
        token = gl.arange(0, seats, gl.SliceLayout(0, gl.SliceLayout(1, of_result)))
        inner = gl.program_id(0) * (rows // 2) + block[:, None] * 8 + line[None, :]
        there = (inner < outs // 2)[:, :, None] & (token < tokens)[None, None, :]
        gl.store(out + token[None, None, :] * (outs // 2) + inner[:, :, None], result, there)
    else:
        token = gl.arange(0, seats, gl.SliceLayout(0, layout))
        there = (row < outs)[:, None] & (token < tokens)[None, :]
        result = whole.to(dtype)
        if ADD:
            result = (old + result.to(gl.float32)).to(dtype)
        gl.store(out + token[None, :] * outs + row[:, None], result, there)


def multiply_few_words(
    x: Tensor,
    weight: WordMap,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    total: Tensor | None = None,
    tile: WarpTile | None = None,
    pdl: bool = False,
) -> Tensor:
    """x W^T + b, or silu(x G^T + g) * (x U^T + u) of gate and up, the weight's halves.

    norm: [in], with which the only token is normalized first
    total: [tokens, out], to which the product is added in place and which is returned

    x: [tokens, in] bfloat16, up to `MOST_TOKENS`
    returns: [tokens, out]; what a token gets depends on no other
    """
    assert norm is None or len(x) == 1, "a program has room for one normalized token"
    assert total is None or not gated
    tokens, outs, units = len(x), weight.outs, weight.tensor.shape[1]
    least = count_norm_warps(weight) if norm is not None else 1
    assert least is not None, "a token of that width is normalized before the product"
    tile = tile or choose_warp_tile(outs, units, least)
    out = x.new_empty(tokens, outs // 2 if gated else outs) if total is None else total
    limits = {} if tile.registers is None else {"maxnreg": tile.registers}
    few_words_kernel[(triton.cdiv(outs, tile.rows),)](
        x.contiguous(),
        weight.tensor,
        weight.extras,
        weight.scales,
        # Pointers that the kernel without them does not read.
        weight.scales if weight.bias is None else weight.bias,
        x if norm is None else norm,
        out,
        out,
        tokens,
        outs,
        eps,
        UNITS=units,
        ROWS=tile.rows,
        TOKENS=MOST_TOKENS,
        WARPS=tile.warps,
        BIAS=weight.bias is not None,
        GATED=gated,
        NORM=norm is not None,
        ADD=total is not None,
        num_warps=tile.warps,
        **limits,
        **weight.constants,
        **launch_options(pdl),
    )
    return out
