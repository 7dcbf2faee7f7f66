"""Products of up to tens of tokens with maps in words."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headstock_triton.portable import add_product
from headstock_triton.split_sums import (
    PartTile,
    choose_many_tile,
    choose_part_tile,
    find_rows,
    make_sums,
    store_sums,
)
from headstock_triton.word_maps import SLICE, TILE, WordMap
from headstock_triton.word_numbers import read_pairs, read_scale, unpack_unit
from headstock_triton.word_registers import multiply_few_words, takes_registers

MOST_PROGRAMS = 528
"""Four for each processor of an H200, each with a few loads under way."""


@triton.jit(do_not_specialize=("tokens",))
def words_kernel(
    x,
    words,
    extras,
    factors,
    bias,
    parts,
    out,
    counters,
    tokens,
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
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    LEFT: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile of rows of the weight and of tokens, and one of PARTS parts of its UNITS units."""
    size: tl.constexpr = SLICES * SLICE
    row, exists = find_rows(outs, ROWS, GATED)
    token, column = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, SLICE)
    first = tl.program_id(1) * (UNITS // PARTS)
    # Rows past the end read the last one again, so that loads need no mask for them.
    near = tl.minimum(row, outs - 1)
    if ROWS == TILE and not GATED:  # known to be one tile: fewer registers for addresses
        place = tl.program_id(0).to(tl.int64) * UNITS + first
        inside = tl.arange(0, ROWS)
    else:
        place, inside = (near // TILE).to(tl.int64) * UNITS + first, near % TILE
    source = words + (place * TILE + inside)[:, None] * SLICE
    extra_source = extras + place * (WORDS * TILE) + inside
    values = x + token[:, None] * (UNITS * size) + first * size + column[None, :]
    there = (token < tokens)[:, None]
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    for unit in tl.range(0, UNITS // PARTS, num_stages=STAGES):
        pairs, scales = read_pairs(extra_source + unit * (WORDS * TILE), TILE, WORDS, GROUPS)
        numbers = unpack_unit(
            source + unit * (TILE * SLICE), pairs, KIND, SLICES, SLICE, PAIRS, CODE, PLACES
        )
        product = sums
        if GROUPS > 0:
            product = tl.zeros((ROWS, TOKENS), tl.float32)
        for number in tl.static_range(SLICES):
            value = tl.load(values + unit * size + number * SLICE, there, other=0.0)
            product = add_product(numbers[number], value.T, product)
            if GROUPS > 0 and (number + 1) * GROUPS % SLICES == 0:
                scale = read_scale(scales[number * GROUPS // SLICES], SHORT)
                sums += product * scale[:, None]
                product = tl.zeros((ROWS, TOKENS), tl.float32)
        if GROUPS == 0:
            sums = product
    sums *= tl.load(factors + near)[:, None]
    store_sums(
        sums, bias, parts, out, counters, row, exists, tokens, outs, PARTS, LEFT, BIAS, GATED,
        tl.program_id(2) * TOKENS,
    )  # fmt: skip


def multiply_words(
    x: Tensor,
    weight: WordMap,
    *,
    gated: bool = False,
    left: bool = False,
    tile: PartTile | None = None,
    pdl: bool = False,
) -> Tensor:
    """x W^T + b, or silu(x G^T + g) * (x U^T + u) of gate and up, the weight's halves.

    x: [tokens, in] bfloat16    left: sums may be left in parts; then the weight has no bias
    tile: of this kernel; without one few tokens may take the other
    returns: [tokens, out], or [parts, tokens, out] float32, whose sum over the parts it is
    """
    if tile is None and takes_registers(x, weight):
        return multiply_few_words(x, weight, gated=gated, pdl=pdl)
    (tokens, _), outs, units = x.shape, weight.outs, weight.tensor.shape[1]
    # With 3 stages instead of 4 the products of 8B take 57 us a layer instead of 59.
    if tile is None and tokens > 64:
        tile = choose_many_tile(outs)
    tile = tile or choose_part_tile(tokens, outs, units, MOST_PROGRAMS, stages=3)
    assert tokens <= tile.tokens or tile.parts == 1, "tiles of tokens have no counters of their own"
    assert not (left and (gated or weight.bias is not None)), "each part would have it"
    out, parts = make_sums(x, outs // 2 if gated else outs, outs, tile, left=left)
    # Kernels that begin while the one before them ends are slower here: their programs take room
    # from those that still read. So `pdl` is for the other kernel alone.
    tiles = (triton.cdiv(outs, tile.rows), tile.parts, triton.cdiv(tokens, tile.tokens))
    words_kernel[tiles](
        x.contiguous(),
        weight.tensor,
        weight.extras,
        weight.scales,
        # A pointer that the kernel without a bias does not read.
        weight.scales if weight.bias is None else weight.bias,
        parts,
        out,
        weight.counters,
        tokens,
        outs,
        UNITS=units,
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        PARTS=tile.parts,
        LEFT=left,
        BIAS=weight.bias is not None,
        GATED=gated,
        STAGES=tile.stages,
        num_warps=tile.warps,
        **weight.constants,
    )
    return out
