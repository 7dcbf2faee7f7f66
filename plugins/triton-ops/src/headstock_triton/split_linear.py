"""Products of tens of tokens whose sums are cut into parts, so that they fill the device.

A narrow product has too few tiles for all processors, and each of them reads its whole depth. Here
several programs share a tile, each with a part of the depth, and the kernel that adds the product
to the stream sums the parts in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from headstock.spi import Weight
from headstock_triton.device_function import device_function
from headstock_triton.numbers import find_packing, widen
from headstock_triton.pdl import begin_next, launch_options, wait_for_previous
from headstock_triton.portable import add_product, round_to

MOST_SPLIT_TOKENS = 128
"""Number of tokens up to which splitting gains more than reading the parts costs, on an H200."""
MOST_GATED_TOKENS = 64
"""Number of tokens up to which a narrow product of gate and up is faster with the activation."""
MOST_OUTS = 2048
"""Rows of a weight up to which torch's product is slower: with more, it fills the device."""
MOST_PARTS = 8
MOST_PROGRAMS = 132
"""One for each processor of an H200. With more, reading the parts costs more than it gains."""


@frozen(kw_only=True)
class SplitTile:
    """Tokens, rows of the weight and depth of a tile, and the number of programs that share its
    depth.

    swap: the weight is the left factor, whose tile has 64 rows on Hopper
    """

    tokens: int
    rows: int
    depth: int
    parts: int = 1
    warps: int = 4
    stages: int = 4
    swap: bool = False


def choose_split_tile(tokens: int, width: int, outs: int) -> SplitTile | None:
    """The tile of a product whose parts are summed later; None if torch's is as fast."""
    if not 0 < tokens <= MOST_SPLIT_TOKENS or outs > MOST_OUTS:
        return None
    if tokens <= 64:
        tile = SplitTile(tokens=32 if tokens <= 32 else 64, rows=64, depth=128, swap=True)
    else:
        tile = SplitTile(tokens=128, rows=64, depth=64, warps=8, stages=5)
    columns = triton.cdiv(outs, tile.rows)
    parts = [
        count
        for count in range(2, MOST_PARTS + 1)
        if width % (count * tile.depth) == 0 and columns * count <= MOST_PROGRAMS
    ]
    if not parts:
        return None
    return SplitTile(
        tokens=tile.tokens,
        rows=tile.rows,
        depth=tile.depth,
        parts=parts[-1],
        warps=tile.warps,
        stages=tile.stages,
        swap=tile.swap,
    )


def choose_gated_tile(tokens: int, width: int, outs: int) -> SplitTile | None:
    """The tile of a product of gate and up, `outs` rows each; None if torch's is as fast."""
    if not 0 < tokens <= MOST_GATED_TOKENS or width % 128 or width > 1024:
        return None
    if tokens <= 32:
        return SplitTile(tokens=32, rows=64, depth=128, swap=True)
    return SplitTile(tokens=64, rows=32, depth=128)


def choose_packed_tile(tokens: int, width: int, outs: int, group: int) -> SplitTile:
    """The tile of a product with a packed weight, whole sums of `outs` rows.

    width: a multiple of 16, as `group` is, the columns that share a scale
    """
    sizes = (size for size in (128, 64, 32, 16) if not width % size and not group % size)
    depth = next(sizes)
    seats = next((size for size in (16, 32) if tokens <= size), 64)
    # Tiles of 64 rows are for Hopper's tensor cores, which need enough of them for all processors.
    is_wide = outs >= 64 * MOST_PROGRAMS
    return SplitTile(tokens=seats, rows=64 if is_wide else 32, depth=depth, swap=is_wide)


@device_function
def _add_scaled(
    numbers,
    zeros,
    value,
    sums,
    factors,
    PACKING: tl.constexpr,
    ZEROS: tl.constexpr,
    SCALED: tl.constexpr,
    SWAP: tl.constexpr,
):
    """sums + the product of a tile, whose rows are multiplied by factors if SCALED.

    numbers: [rows, depth], or half as many bytes    value: [tokens, depth]
    zeros, factors: pointers, [rows]
    """
    zero = tl.load(zeros).to(tl.float32)[:, None] if ZEROS else 8.0
    w = widen(numbers, zero, value.dtype, PACKING, ZEROS)
    start = tl.zeros_like(sums) if SCALED else sums
    product = add_product(w, value.T, start) if SWAP else add_product(value, w.T, start)
    if SCALED:
        factor = tl.load(factors).to(tl.float32)
        product = sums + product * (factor[:, None] if SWAP else factor[None, :])
    return product


@device_function
def _finish(sums, factors, shifts, SCALED: tl.constexpr, BIAS: tl.constexpr, SWAP: tl.constexpr):
    """The sums times a factor of their row, if SCALED, and with a bias.

    factors, shifts: pointers, [rows]
    """
    if SCALED:
        factor = tl.load(factors).to(tl.float32)
        sums *= factor[:, None] if SWAP else factor[None, :]
    if BIAS:
        shift = tl.load(shifts).to(tl.float32)
        sums += shift[:, None] if SWAP else shift[None, :]
    return sums


# The number of tokens changes between steps.
@triton.jit(do_not_specialize=("tokens",))
def split_kernel(
    x,
    weight,
    scales,
    zeros,
    bias,
    out,
    tokens,
    outs,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    PACKING: tl.constexpr,
    ZEROS: tl.constexpr,
    SCALED: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    COLUMN_GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    SWAP: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of tokens and rows of the weight, and one part of its depth.

    SCALED: numbers of the weight have a scale for each ROW_GROUP rows and COLUMN_GROUP columns, of
    which a step of the depth lies in one
    GATED: rows of gate and up give silu(gate) * up, rounded as the torch operations round it.
    """
    begin_next(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(2)
    first = part * (WIDTH // PARTS)
    k = first + tl.arange(0, DEPTH)
    # Rows past the end read the last one again, so that loads need no mask for them.
    near = tl.minimum(row, outs - 1).to(tl.int64)
    share: tl.constexpr = 2 if PACKING > 0 else 1  # numbers in a byte
    stride: tl.constexpr = WIDTH // share
    places = first // share + tl.arange(0, DEPTH // share)
    source = weight + near[:, None] * stride + places[None, :]
    groups: tl.constexpr = (WIDTH + COLUMN_GROUP - 1) // COLUMN_GROUP
    by_row: tl.constexpr = SCALED and groups == 1
    by_group: tl.constexpr = SCALED and groups > 1
    group_row, up_group_row = near // ROW_GROUP * groups, (near + outs) // ROW_GROUP * groups
    factors, up_factors = scales + group_row, scales + up_group_row
    lows, up_lows = zeros + group_row, zeros + up_group_row
    there = token < tokens
    values = x + token.to(tl.int64)[:, None] * WIDTH + k[None, :]
    wait_for_previous(PDL)
    sums = tl.zeros((ROWS, TOKENS) if SWAP else (TOKENS, ROWS), tl.float32)
    up_sums = tl.zeros((ROWS, TOKENS) if SWAP else (TOKENS, ROWS), tl.float32)
    for start in tl.range(0, WIDTH // PARTS, DEPTH, num_stages=STAGES):
        value = tl.load(values + start, there[:, None], other=0.0)
        w = tl.load(source + start // share)
        group = (first + start) // COLUMN_GROUP
        sums = _add_scaled(
            w, lows + group, value, sums, factors + group, PACKING, ZEROS, by_group, SWAP
        )
        if GATED:
            up = tl.load(source + start // share + outs.to(tl.int64) * stride)
            low, factor = up_lows + group, up_factors + group
            up_sums = _add_scaled(up, low, value, up_sums, factor, PACKING, ZEROS, by_group, SWAP)
    sums = _finish(sums, factors, bias + near, by_row, BIAS, SWAP)
    if SWAP:
        place = token.to(tl.int64)[None, :] * outs + row[:, None]
        mask = (row < outs)[:, None] & there[None, :]
    else:
        place = token.to(tl.int64)[:, None] * outs + row[None, :]
        mask = there[:, None] & (row < outs)[None, :]
    dtype: tl.constexpr = x.dtype.element_ty
    if GATED:
        up_sums = _finish(up_sums, up_factors, bias + outs + near, by_row, BIAS, SWAP)
        gate = round_to(sums, dtype).to(tl.float32)
        silu = round_to(gate / (1.0 + tl.exp(-gate)), dtype).to(tl.float32)
        result = round_to(silu * round_to(up_sums, dtype).to(tl.float32), dtype)
        tl.store(out + place, result, mask)
    else:
        result = round_to(sums, out.dtype.element_ty)
        tl.store(out + part.to(tl.int64) * tokens * outs + place, result, mask)


def multiply_in_parts(x: Tensor, weight: Weight, tile: SplitTile, *, pdl: bool = False) -> Tensor:
    """Terms whose sum over the first dimension is x W^T.

    x: [tokens, in] of 16 bits    weight: [out, in], without a bias
    returns: [parts, tokens, out] float32
    """
    assert weight.bias is None, "each part would add it"
    outs = len(weight.tensor)
    out = x.new_empty((tile.parts, len(x), outs), dtype=torch.float32)
    _launch(x, weight, out, outs, tile, gated=False, pdl=pdl)
    return out


def multiply_whole(x: Tensor, weight: Weight, tile: SplitTile, *, pdl: bool = False) -> Tensor:
    """x W^T + b.   x: [tokens, in] of 16 bits    weight: [out, in]    returns: [tokens, out]"""
    outs = len(weight.tensor)
    out = x.new_empty(len(x), outs)
    _launch(x, weight, out, outs, tile, gated=False, pdl=pdl)
    return out


def multiply_gated(x: Tensor, weight: Weight, tile: SplitTile, *, pdl: bool = False) -> Tensor:
    """silu(x G^T + g) * (x U^T + u), where gate and up are the halves of weight and bias.

    x: [tokens, in] of 16 bits    weight: [2 * out, in]    returns: [tokens, out]
    """
    outs = len(weight.tensor) // 2
    out = x.new_empty(len(x), outs)
    _launch(x, weight, out, outs, tile, gated=True, pdl=pdl)
    return out


def _launch(
    x: Tensor, weight: Weight, out: Tensor, outs: int, tile: SplitTile, *, gated: bool, pdl: bool
) -> None:
    """Launch one program per tile of rows, tile of tokens, and part.   writes: out"""
    tokens, width = x.shape
    format, numbers = weight.format, weight.tensor
    row_group, column_group = (None if format is None else format.group) or (1, width)
    split_kernel[(triton.cdiv(outs, tile.rows), triton.cdiv(tokens, tile.tokens), tile.parts)](
        x.contiguous(),
        numbers,
        # Pointers that this variant of the kernel does not read.
        numbers if weight.scales is None else weight.scales,
        numbers if weight.zeros is None else weight.zeros,
        numbers if weight.bias is None else weight.bias,
        out,
        tokens,
        outs,
        WIDTH=width,
        GATED=gated,
        PACKING=find_packing(weight),
        ZEROS=weight.zeros is not None,
        SCALED=format is not None,
        ROW_GROUP=row_group,
        COLUMN_GROUP=column_group,
        BIAS=weight.bias is not None,
        TOKENS=tile.tokens,
        ROWS=tile.rows,
        DEPTH=tile.depth,
        PARTS=tile.parts,
        SWAP=tile.swap,
        STAGES=tile.stages,
        num_warps=tile.warps,
        **launch_options(pdl),
    )
