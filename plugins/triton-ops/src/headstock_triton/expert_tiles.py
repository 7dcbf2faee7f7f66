"""Products of blocks of tokens with their experts' weights, in tensor cores."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor, bfloat16, dtype
from triton.tools.tensor_descriptor import TensorDescriptor

from headstock_triton.device_function import device_function
from headstock_triton.expert_gates import PLAIN_GATE, ExpertGate, apply_gate
from headstock_triton.expert_scales import GroupScales
from headstock_triton.expert_terms import combine_terms
from headstock_triton.pair_blocks import Blocks
from headstock_triton.portable import INTERPRETED, round_to, widen_to
from headstock_triton.tiles import Tile, Tiles


@device_function
def _add_product(lhs, rhs, sums):
    """sums + lhs @ rhs in float32; float32 factors are not shortened."""
    if INTERPRETED:
        return tl.dot(lhs.to(tl.float32), rhs.to(tl.float32), sums)
    if lhs.dtype == tl.float32:
        return tl.dot(lhs, rhs, sums, input_precision="ieee")
    return tl.dot(lhs, rhs, sums)


@device_function
def _add_tile(w, a, sums, factors, SCALED: tl.constexpr, SWAP: tl.constexpr):
    """sums + the product of a tile, whose rows are multiplied by factors if SCALED.

    w: [rows, depth]    a: [tokens, depth]    factors: pointers, [rows]
    """
    wide = widen_to(w, a.dtype)
    # The tensor cores of FP8 keep 14 bits of a sum, which ends with a step.
    is_short: tl.constexpr = a.dtype == tl.float8e4nv
    start = tl.zeros_like(sums) if SCALED or is_short else sums
    product = _add_product(wide, a.T, start) if SWAP else _add_product(a, wide.T, start)
    if SCALED:
        factor = tl.load(factors).to(tl.float32)
        product = sums + product * (factor[:, None] if SWAP else factor[None, :])
    elif is_short:
        product += sums
    return product


@device_function
def locate_block(blocks, columns, GROUP: tl.constexpr):
    """The block and the column of a program; neighbours share weights and tokens in the cache."""
    program = tl.program_id(0)
    first = program // (GROUP * columns) * GROUP
    size = tl.minimum(blocks - first, GROUP)
    inside = program % (GROUP * columns)
    return first + inside % size, inside // size


@triton.jit(do_not_specialize=("blocks",))
def gate_up_tiles_kernel(
    x,
    order,
    table,
    weight,
    scales,
    bias,
    token_scales,
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
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    COLUMN_GROUP: tl.constexpr,
    ROUNDED: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The gate times up of a block's tokens and BN columns.

    ROUNDED: tokens are in FP8, each with a scale

    Rows of gate and up alternate in the tile of weights, so that both halves of a column end up in
    the same thread.
    """
    block, column = locate_block(blocks, tl.cdiv(INTERS, BN), GROUP)
    rows = tl.load(table + 2 * block + 1)
    # The host launches the maximum number of blocks; those past the last have no rows.
    if rows > 0:
        expert = tl.load(table + 2 * block)
        row = tl.arange(0, BM)
        pair = tl.load(order + block * BM + row, row < rows, other=0)
        k = tl.arange(0, BK)
        lhs = x + (pair // CHOSEN).to(tl.int64)[:, None] * WIDTH + k[None, :]
        both = tl.arange(0, 2 * BN)
        # Columns past the end read the last one again, so that loads need no mask for them; the
        # store leaves them out.
        source = tl.minimum(column * BN + both // 2, INTERS - 1) + (both % 2) * INTERS
        if not TMA:
            rhs = (
                weight
                + expert.to(tl.int64) * 2 * INTERS * WIDTH
                + source[:, None] * WIDTH
                + k[None, :]
            )
        groups: tl.constexpr = (WIDTH + COLUMN_GROUP - 1) // COLUMN_GROUP
        row_groups: tl.constexpr = (2 * INTERS + ROW_GROUP - 1) // ROW_GROUP
        by_group: tl.constexpr = SCALED and groups > 1
        factors = scales + (expert.to(tl.int64) * row_groups + source // ROW_GROUP) * groups
        # Swapped, the weight fills the 64 rows of the left factor of Hopper's tensor cores; a few
        # tokens would be padded to 64.
        sums = tl.zeros((2 * BN, BM), tl.float32) if SWAP else tl.zeros((BM, 2 * BN), tl.float32)
        for start in range(0, WIDTH, BK):
            if EVEN:
                a = tl.load(lhs + start, (row < rows)[:, None], other=0.0)
            else:
                a = tl.load(
                    lhs + start, (row < rows)[:, None] & (k < WIDTH - start)[None, :], other=0.0
                )
            if TMA:
                w = weight.load([expert, column * BN, 0, start]).reshape(2 * BN, BK)
            elif EVEN:
                w = tl.load(rhs + start)
            else:
                w = tl.load(rhs + start, (k < WIDTH - start)[None, :], other=0.0)
            sums = _add_tile(w, a, sums, factors + start // COLUMN_GROUP, by_group, SWAP)
        if SWAP:
            sums = sums.T
        if SCALED and groups == 1:
            sums *= tl.load(factors).to(tl.float32)[None, :]
        if ROUNDED:
            sums *= tl.load(token_scales + pair // CHOSEN)[:, None]
        if BIAS:
            shifts = bias + expert.to(tl.int64) * 2 * INTERS + source
            sums += tl.load(shifts).to(tl.float32)[None, :]
        gate, up = tl.split(sums.reshape(BM, BN, 2))
        result = round_to(apply_gate(gate, up, GATE, LIMIT, SLOPE), inner.dtype.element_ty)
        out = column * BN + tl.arange(0, BN)
        place = (block * BM + row).to(tl.int64)[:, None] * INTERS + out[None, :]
        tl.store(inner + place, result, (row < rows)[:, None] & (out < INTERS)[None, :])


@triton.jit(do_not_specialize=("blocks",))
def down_tiles_kernel(
    inner,
    order,
    table,
    weights,
    weight,
    scales,
    bias,
    token_scales,
    out,
    blocks,
    WIDTH: tl.constexpr,
    INTERS: tl.constexpr,
    BIAS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    COLUMN_GROUP: tl.constexpr,
    ROUNDED: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
):
    """A block's rows times down and the pairs' weights, BN columns, each pair to its own row.

    ROUNDED: the rows are in FP8, each with a scale
    """
    block, column = locate_block(blocks, tl.cdiv(WIDTH, BN), GROUP)
    # Request everything that the end needs at the start: sums of `INTERS` terms are short.
    expert, rows = tl.load(table + 2 * block), tl.load(table + 2 * block + 1)
    row = tl.arange(0, BM)
    pair = tl.load(order + block * BM + row)
    if rows > 0:
        pair = tl.where(row < rows, pair, 0)
        share = tl.load(weights + pair)
        k = tl.arange(0, BK)
        lhs = inner + (block * BM + row).to(tl.int64)[:, None] * INTERS + k[None, :]
        source = tl.minimum(column * BN + tl.arange(0, BN), WIDTH - 1)
        if not TMA:
            rhs = (
                weight
                + expert.to(tl.int64) * WIDTH * INTERS
                + source[:, None] * INTERS
                + k[None, :]
            )
        groups: tl.constexpr = (INTERS + COLUMN_GROUP - 1) // COLUMN_GROUP
        row_groups: tl.constexpr = (WIDTH + ROW_GROUP - 1) // ROW_GROUP
        by_group: tl.constexpr = SCALED and groups > 1
        factors = scales + (expert.to(tl.int64) * row_groups + source // ROW_GROUP) * groups
        sums = tl.zeros((BN, BM), tl.float32) if SWAP else tl.zeros((BM, BN), tl.float32)
        for start in range(0, INTERS, BK):
            if EVEN:
                a = tl.load(lhs + start, (row < rows)[:, None], other=0.0)
            else:
                a = tl.load(
                    lhs + start, (row < rows)[:, None] & (k < INTERS - start)[None, :], other=0.0
                )
            if TMA:
                w = weight.load([expert * WIDTH + column * BN, start])
            elif EVEN:
                w = tl.load(rhs + start)
            else:
                w = tl.load(rhs + start, (k < INTERS - start)[None, :], other=0.0)
            sums = _add_tile(w, a, sums, factors + start // COLUMN_GROUP, by_group, SWAP)
        if SWAP:
            sums = sums.T
        if SCALED and groups == 1:
            sums *= tl.load(factors).to(tl.float32)[None, :]
        if ROUNDED:
            sums *= tl.load(token_scales + block * BM + row)[:, None]
        if BIAS:
            shifts = bias + expert.to(tl.int64) * WIDTH + source
            sums += tl.load(shifts).to(tl.float32)[None, :]
        to = column * BN + tl.arange(0, BN)
        place = pair.to(tl.int64)[:, None] * WIDTH + to[None, :]
        mask = (row < rows)[:, None] & (to < WIDTH)[None, :]
        tl.store(out + place, round_to(sums * share[:, None], out.dtype.element_ty), mask)


def mix_tiles(x: Tensor, blocks: Blocks, gate_up: Tensor, down: Tensor, tiles: Tiles) -> Tensor:
    """The weighted sum of the outputs of each token's experts; 0 for padding.

    x, result: [tokens, hidden]
    gate_up: [experts, 2 * intermediate, hidden]
    down: [experts, hidden, intermediate]
    """
    inner = multiply_gate_up(x, blocks, gate_up, tiles.gate_up)
    terms = multiply_down(inner, blocks, down, tiles.down)
    return combine_terms(terms[None], blocks, x.dtype)


def multiply_gate_up(
    x: Tensor,
    blocks: Blocks,
    weight: Tensor,
    tile: Tile,
    scales: GroupScales | None = None,
    bias: Tensor | None = None,
    gate: ExpertGate = PLAIN_GATE,
    token_scales: Tensor | None = None,
) -> Tensor:
    """The gate times up of every pair, in block order.

    token_scales: of tokens in FP8, [tokens, 1] float32
    returns: [blocks * rows, intermediate]
    """
    count, double, width = weight.shape
    inters = double // 2
    inner = x.new_empty(len(blocks.order), inters, dtype=_find_type(x, token_scales))
    factors = weight if scales is None else scales.numbers
    tile = tile if scales is None else scales.fit(tile, width)
    source: Any = weight
    tma = tile.tma and _is_describable(weight)
    if tma:
        # A view in which rows of gate and up alternate, as the kernel expects, without copying.
        strides = [double * width, width, inters * width, 1]
        source = TensorDescriptor(
            weight, [count, inters, 2, width], strides, [1, tile.n, 2, tile.k]
        )
    _launch_tiles(
        gate_up_tiles_kernel,
        (x, blocks.order, blocks.table, source, factors, weight if bias is None else bias),
        inner,
        blocks,
        tile,
        scales,
        token_scales,
        columns=inters,
        depth=width,
        BIAS=bias is not None,
        GATE=gate.number,
        LIMIT=gate.limit,
        SLOPE=gate.slope,
        WIDTH=width,
        INTERS=inters,
        CHOSEN=blocks.routes.ids.shape[1],
        TMA=tma,
    )
    return inner


def multiply_down(
    inner: Tensor,
    blocks: Blocks,
    weight: Tensor,
    tile: Tile,
    scales: GroupScales | None = None,
    bias: Tensor | None = None,
    token_scales: Tensor | None = None,
) -> Tensor:
    """Each pair's term of its token; rows of padding are undefined.

    token_scales: of rows in FP8, [blocks * rows, 1] float32
    returns: [tokens * per_token, hidden]
    """
    count, width, inters = weight.shape
    # One row per pair, summed by a separate kernel: adding to a token's row here would need
    # atomics, whose order is undefined.
    pairs = blocks.routes.ids.numel()
    terms = inner.new_empty(pairs, width, dtype=_find_type(inner, token_scales))
    factors = weight if scales is None else scales.numbers
    tile = tile if scales is None else scales.fit(tile, inters)
    source: Any = weight
    tma = tile.tma and _is_describable(weight)
    if tma:
        source = TensorDescriptor(weight, [count * width, inters], [inters, 1], [tile.n, tile.k])
    pointers = (inner, blocks.order, blocks.table, blocks.routes.weights, source, factors)
    _launch_tiles(
        down_tiles_kernel,
        (*pointers, weight if bias is None else bias),
        terms,
        blocks,
        tile,
        scales,
        token_scales,
        BIAS=bias is not None,
        columns=width,
        depth=inters,
        WIDTH=width,
        INTERS=inters,
        TMA=tma,
    )
    return terms


def _launch_tiles(
    kernel: Any,
    pointers: tuple[Any, ...],
    out: Tensor,
    blocks: Blocks,
    tile: Tile,
    scales: GroupScales | None,
    token_scales: Tensor | None,
    *,
    columns: int,
    depth: int,
    **constants: Any,
) -> None:
    """Launch a product of all blocks: one program per block and `tile.n` of `columns`.

    pointers: the kernel's arguments before the scales of tokens
    depth: number of terms of each sum, which is cut into steps of `tile.k`
    """
    # The maximum number of blocks: the actual number is only known on the device, and a graph
    # cannot wait for the host to read it.
    total = len(blocks.table)
    kernel[(total * triton.cdiv(columns, tile.n),)](
        *pointers,
        # A pointer that the kernel of plain tokens does not read.
        out if token_scales is None else token_scales,
        out,
        total,
        BM=blocks.rows,
        BN=tile.n,
        BK=tile.k,
        GROUP=tile.group,
        ROUNDED=token_scales is not None,
        SWAP=tile.swap,
        SCALED=scales is not None,
        ROW_GROUP=1 if scales is None else scales.rows,
        COLUMN_GROUP=depth if scales is None else scales.columns,
        EVEN=depth % tile.k == 0,  # the last step needs no mask then
        num_warps=tile.warps,
        num_stages=tile.stages,
        **constants,
    )


def _find_type(rows: Tensor, scales: Tensor | None) -> dtype:
    """The type of what is made of rows, which are in FP8 where they have scales."""
    return rows.dtype if scales is None else bfloat16


def _is_describable(weight: Tensor) -> bool:
    """Whether the tensor memory accelerator can load `weight`: rows are aligned to 16 bytes."""
    return weight.shape[-1] * weight.element_size() % 16 == 0
