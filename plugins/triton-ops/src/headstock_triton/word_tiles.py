"""Products of blocks of tokens with their experts' weights of 4 bits, in tensor cores."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from attrs import evolve, frozen
from torch import Tensor, float32

from headstock_triton.device_function import device_function
from headstock_triton.expert_gates import PLAIN_GATE, ExpertGate, apply_gate
from headstock_triton.expert_tiles import locate_block
from headstock_triton.pair_blocks import Blocks
from headstock_triton.portable import add_product, round_to
from headstock_triton.word_experts import (
    SLICE,
    SLICES_OF_UNIT,
    TILE_ROWS,
    UNIT,
    UNIT_COLUMNS,
    WordExperts,
)
from headstock_triton.word_numbers import read_pairs, read_scale, unpack_unit


@frozen(kw_only=True)
class WordTile:
    """Products of blocks of `rows` pairs.

    outs: rows of the weight in one program    parts: of the inputs of down, which are summed later
    group: consecutive blocks of a column
    """

    rows: int
    outs: int = 64
    parts: int = 1
    warps: int = 4
    stages: int = 4
    group: int = 1


_RULES: tuple[tuple[float, WordTile], ...] = (
    (0.25, WordTile(rows=8, outs=32, warps=2, stages=6, parts=2)),
    (2, WordTile(rows=8, outs=32, warps=2, stages=6)),
    (6, WordTile(rows=16, outs=32, warps=2, stages=6)),
    (16, WordTile(rows=32)),
    (48, WordTile(rows=64, outs=128, warps=8, stages=3, group=4)),
    (float("inf"), WordTile(rows=128, outs=128, warps=8, stages=3, group=8)),
)
"""The maximum average number of pairs per expert -> the tile; not measured. Two warps multiply
without waiting for each other; four or eight need fewer instructions.
"""
_MOST_GROUPED_ROWS = 64
"""Of a block whose products are scaled by several groups of a unit: registers hold both sums."""


def choose_word_tile(tokens: int, per_token: int, count: int, groups: int = 0) -> WordTile:
    """The tile for this number of tokens and experts.   groups: most scales of a unit"""
    mean = tokens * per_token / count
    tile = next(tile for most, tile in _RULES if mean <= most)
    return evolve(tile, rows=min(tile.rows, _MOST_GROUPED_ROWS)) if groups > 1 else tile


@device_function
def _multiply_units(
    lhs,
    inside,
    words,
    extras,
    first,
    COUNT: tl.constexpr,
    UNITS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
    GROUPS: tl.constexpr,
    SPAN: tl.constexpr,
    EVEN: tl.constexpr,
    SHORT: tl.constexpr,
    KIND: tl.constexpr,
    SLICES: tl.constexpr,
    PAIRS: tl.constexpr,
    CODE: tl.constexpr,
    PLACES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The product of some units with a block's tokens, before whole rows are scaled.

    lhs: pointers to the tokens' rows, [tokens, 1]    inside: [tokens, 1]
    words, extras: pointers to unit 0 of each row, [rows, 1] and [rows]
    first: of COUNT units
    returns: [rows, tokens]
    """
    k = tl.arange(0, SLICE)[None, :]
    sums = tl.zeros((words.shape[0], lhs.shape[0]), tl.float32)
    for step in tl.range(0, COUNT, num_stages=STAGES):
        # Units past the end read the last one again, for tokens' numbers of 0.
        unit = tl.minimum(first + step, UNITS - 1)
        pairs, scales = read_pairs(extras + unit * (WORDS * TILE), TILE, WORDS, GROUPS)
        source = words + unit * (TILE * SLICE)
        numbers = unpack_unit(source, pairs, KIND, SLICES, SLICE, PAIRS, CODE, PLACES)
        product = sums
        if GROUPS > 0:
            product = tl.zeros_like(sums)
        for number in tl.static_range(SLICES):
            at = (first + step) * UNIT + number * SLICE
            mask = inside
            if not EVEN:
                mask = inside & (at + k < WIDTH)
            token = tl.load(lhs + at + k, mask, other=0.0)
            product = add_product(numbers[number], token.T, product)
            if GROUPS > 0 and (number + 1) % SPAN == 0:
                scale = read_scale(scales[number // SPAN], SHORT)
                sums += product * scale[:, None]
                product = tl.zeros_like(sums)
        if GROUPS == 0:
            sums = product
    return sums


@triton.jit(do_not_specialize=("blocks",))
def gate_up_words_kernel(
    x,
    order,
    table,
    words,
    extras,
    factors,
    bias,
    inner,
    blocks,
    WIDTH: tl.constexpr,
    INTERS: tl.constexpr,
    CHOSEN: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    LIMIT: tl.constexpr,
    SLOPE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    UNITS: tl.constexpr,
    WORDS: tl.constexpr,
    GROUPS: tl.constexpr,
    SPAN: tl.constexpr,
    EVEN: tl.constexpr,
    SHORT: tl.constexpr,
    KIND: tl.constexpr,
    SLICES: tl.constexpr,
    PAIRS: tl.constexpr,
    CODE: tl.constexpr,
    PLACES: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The gate times up of a block's tokens and BN / 2 columns, whose rows of both take turns."""
    half: tl.constexpr = BN // 2
    block, column = locate_block(blocks, tl.cdiv(INTERS, half), GROUP)
    rows = tl.load(table + 2 * block + 1)
    # The host launches the maximum number of blocks; those past the last have no rows.
    if rows > 0:
        expert = tl.load(table + 2 * block).to(tl.int64)
        token, both = tl.arange(0, BM), tl.arange(0, BN)
        inside = token < rows
        pair = tl.load(order + block * BM + token, inside, other=0)
        # Columns past the end read the last one again; the store leaves them out.
        row = tl.minimum(column * half + both // 2, INTERS - 1) + both % 2 * INTERS
        at = (expert * TILES + row // TILE) * UNITS
        sums = _multiply_units(
            x + (pair // CHOSEN).to(tl.int64)[:, None] * WIDTH,
            inside[:, None],
            words + ((at * TILE + row % TILE) * SLICE)[:, None],
            extras + at * (WORDS * TILE) + row % TILE,
            0,
            UNITS,
            UNITS,
            WIDTH,
            TILE,
            WORDS,
            GROUPS,
            SPAN,
            EVEN,
            SHORT,
            KIND,
            SLICES,
            PAIRS,
            CODE,
            PLACES,
            STAGES,
        )
        sums *= tl.load(factors + expert * (TILES * TILE) + row)[:, None]
        if BIAS:
            sums += tl.load(bias + expert * (2 * INTERS) + row).to(tl.float32)[:, None]
        gate, up = tl.split(sums.T.reshape(BM, half, 2))
        result = round_to(apply_gate(gate, up, GATE, LIMIT, SLOPE), inner.dtype.element_ty)
        out = column * half + tl.arange(0, half)
        place = (block * BM + token).to(tl.int64)[:, None] * INTERS + out[None, :]
        tl.store(inner + place, result, inside[:, None] & (out < INTERS)[None, :])


@triton.jit(do_not_specialize=("blocks", "pairs"))
def down_words_kernel(
    inner,
    order,
    table,
    shares,
    words,
    extras,
    factors,
    bias,
    out,
    blocks,
    pairs,
    WIDTH: tl.constexpr,
    INTERS: tl.constexpr,
    BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    UNITS: tl.constexpr,
    WORDS: tl.constexpr,
    PARTS: tl.constexpr,
    COUNT: tl.constexpr,
    GROUPS: tl.constexpr,
    SPAN: tl.constexpr,
    EVEN: tl.constexpr,
    SHORT: tl.constexpr,
    KIND: tl.constexpr,
    SLICES: tl.constexpr,
    PAIRS: tl.constexpr,
    CODE: tl.constexpr,
    PLACES: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A part of a block's rows times down and the pairs' shares, each pair to a row of its own."""
    block, column = locate_block(blocks, tl.cdiv(WIDTH, BN), GROUP)
    part = tl.program_id(1)
    rows = tl.load(table + 2 * block + 1)
    if rows > 0:
        expert = tl.load(table + 2 * block).to(tl.int64)
        token = tl.arange(0, BM)
        inside = token < rows
        pair = tl.load(order + block * BM + token, inside, other=0)
        share = tl.load(shares + pair)
        to = column * BN + tl.arange(0, BN)
        row = tl.minimum(to, WIDTH - 1)
        at = (expert * TILES + row // TILE) * UNITS
        sums = _multiply_units(
            inner + (block * BM + token).to(tl.int64)[:, None] * INTERS,
            inside[:, None],
            words + ((at * TILE + row % TILE) * SLICE)[:, None],
            extras + at * (WORDS * TILE) + row % TILE,
            part * COUNT,
            COUNT,
            UNITS,
            INTERS,
            TILE,
            WORDS,
            GROUPS,
            SPAN,
            EVEN,
            SHORT,
            KIND,
            SLICES,
            PAIRS,
            CODE,
            PLACES,
            STAGES,
        )
        sums *= tl.load(factors + expert * (TILES * TILE) + row)[:, None]
        if BIAS:
            shift = tl.load(bias + expert * WIDTH + row).to(tl.float32)
            if PARTS > 1:
                shift = tl.where(part == 0, shift, 0.0)
            sums += shift[:, None]
        place = (part * pairs + pair).to(tl.int64)[None, :] * WIDTH + to[:, None]
        mask = inside[None, :] & (to < WIDTH)[:, None]
        tl.store(out + place, round_to(sums * share[None, :], out.dtype.element_ty), mask)


def multiply_gate_up_words(
    x: Tensor,
    blocks: Blocks,
    weight: WordExperts,
    tile: WordTile,
    gate: ExpertGate = PLAIN_GATE,
) -> Tensor:
    """The gate times up of every pair, in block order.

    x: [tokens, hidden] bfloat16    blocks: of `tile.rows`
    returns: [blocks * rows, intermediate]
    """
    inters = weight.outs // 2
    inner = x.new_empty(len(blocks.order), inters)
    _launch(
        gate_up_words_kernel,
        (x, blocks.order, blocks.table),
        (inner, len(blocks.table)),
        weight,
        blocks,
        tile,
        columns=triton.cdiv(inters, tile.outs // 2),
        WIDTH=weight.width,
        INTERS=inters,
        CHOSEN=blocks.routes.ids.shape[1],
        GATE=gate.number,
        LIMIT=gate.limit,
        SLOPE=gate.slope,
    )
    return inner


def multiply_down_words(
    inner: Tensor, blocks: Blocks, weight: WordExperts, tile: WordTile
) -> Tensor:
    """Each pair's term of its token; rows of padding are undefined.

    inner: [blocks * rows, intermediate] bfloat16    blocks: of `tile.rows`
    returns: [tile.parts, tokens * per_token, hidden], parts in float32
    """
    pairs = blocks.routes.ids.numel()
    dtype = inner.dtype if tile.parts == 1 else float32
    terms = inner.new_empty(tile.parts, pairs, weight.outs, dtype=dtype)
    _launch(
        down_words_kernel,
        (inner, blocks.order, blocks.table, blocks.routes.weights),
        (terms, len(blocks.table), pairs),
        weight,
        blocks,
        tile,
        columns=triton.cdiv(weight.outs, tile.outs),
        parts=tile.parts,
        WIDTH=weight.outs,
        INTERS=weight.width,
        PARTS=tile.parts,
        COUNT=triton.cdiv(weight.tensor.shape[2], tile.parts),
    )
    return terms


def _launch(
    kernel: Any,
    before: tuple[object, ...],
    after: tuple[object, ...],
    weight: WordExperts,
    blocks: Blocks,
    tile: WordTile,
    *,
    columns: int,
    parts: int = 1,
    **constants: object,
) -> None:
    """Launch a product of all blocks: a program for each block, some of `columns` and each part.

    before, after: arguments of the kernel beside those of the weight
    """
    tiles, units = weight.tensor.shape[1:3]
    total = len(blocks.table)
    kernel[(total * columns, parts)](
        *before,
        weight.tensor,
        weight.extras,
        weight.scales,
        # A pointer that the kernel does not read where there is no bias.
        weight.tensor if weight.bias is None else weight.bias,
        *after,
        BIAS=weight.bias is not None,
        BM=tile.rows,
        BN=tile.outs,
        TILE=TILE_ROWS,
        TILES=tiles,
        UNITS=units,
        SPAN=SLICES_OF_UNIT // max(weight.groups, 1),  # slices of a group
        EVEN=weight.width == units * UNIT_COLUMNS and units % parts == 0,
        GROUP=tile.group,
        STAGES=tile.stages,
        num_warps=tile.warps,
        **weight.constants,
        **constants,
    )
