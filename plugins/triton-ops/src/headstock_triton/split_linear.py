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


# The number of tokens changes between steps.
@triton.jit(do_not_specialize=("tokens",))
def split_kernel(
    x,
    weight,
    out,
    tokens,
    outs,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    SWAP: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of tokens and rows of the weight, and one part of its depth.

    GATED: rows of gate and up give silu(gate) * up, rounded as the torch operations round it.
    """
    begin_next(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(2)
    first = part * (WIDTH // PARTS)
    k = first + tl.arange(0, DEPTH)
    # Rows past the end read the last one again, so that loads need no mask for them.
    source = weight + tl.minimum(row, outs - 1).to(tl.int64)[:, None] * WIDTH + k[None, :]
    there = token < tokens
    values = x + token.to(tl.int64)[:, None] * WIDTH + k[None, :]
    wait_for_previous(PDL)
    sums = tl.zeros((ROWS, TOKENS) if SWAP else (TOKENS, ROWS), tl.float32)
    up_sums = tl.zeros((ROWS, TOKENS) if SWAP else (TOKENS, ROWS), tl.float32)
    for start in tl.range(0, WIDTH // PARTS, DEPTH, num_stages=STAGES):
        value = tl.load(values + start, there[:, None], other=0.0)
        w = tl.load(source + start)
        sums = add_product(w, value.T, sums) if SWAP else add_product(value, w.T, sums)
        if GATED:
            up = tl.load(source + start + outs.to(tl.int64) * WIDTH)
            up_sums = (
                add_product(up, value.T, up_sums) if SWAP else add_product(value, up.T, up_sums)
            )
    if SWAP:
        place = token.to(tl.int64)[None, :] * outs + row[:, None]
        mask = (row < outs)[:, None] & there[None, :]
    else:
        place = token.to(tl.int64)[:, None] * outs + row[None, :]
        mask = there[:, None] & (row < outs)[None, :]
    dtype: tl.constexpr = x.dtype.element_ty
    if GATED:
        gate = round_to(sums, dtype).to(tl.float32)
        silu = round_to(gate / (1.0 + tl.exp(-gate)), dtype).to(tl.float32)
        result = round_to(silu * round_to(up_sums, dtype).to(tl.float32), dtype)
        tl.store(out + place, result, mask)
    else:
        tl.store(out + part.to(tl.int64) * tokens * outs + place, sums, mask)


def multiply_in_parts(x: Tensor, weight: Tensor, tile: SplitTile, *, pdl: bool = False) -> Tensor:
    """Terms whose sum over the first dimension is x W^T.

    x: [tokens, in] of 16 bits    weight: [out, in]    returns: [parts, tokens, out] float32
    """
    out = x.new_empty((tile.parts, len(x), len(weight)), dtype=torch.float32)
    _launch(x, weight, out, len(weight), tile, gated=False, pdl=pdl)
    return out


def multiply_gated(x: Tensor, weight: Tensor, tile: SplitTile, *, pdl: bool = False) -> Tensor:
    """silu(x G^T) * (x U^T), where gate and up are the weight's halves.

    x: [tokens, in] of 16 bits    weight: [2 * out, in]    returns: [tokens, out]
    """
    out = x.new_empty(len(x), len(weight) // 2)
    _launch(x, weight, out, len(weight) // 2, tile, gated=True, pdl=pdl)
    return out


def _launch(
    x: Tensor, weight: Tensor, out: Tensor, outs: int, tile: SplitTile, *, gated: bool, pdl: bool
) -> None:
    """Launch one program per tile of rows, tile of tokens, and part.   writes: out"""
    tokens, width = x.shape
    split_kernel[(triton.cdiv(outs, tile.rows), triton.cdiv(tokens, tile.tokens), tile.parts)](
        x.contiguous(),
        weight,
        out,
        tokens,
        outs,
        WIDTH=width,
        GATED=gated,
        TOKENS=tile.tokens,
        ROWS=tile.rows,
        DEPTH=tile.depth,
        PARTS=tile.parts,
        SWAP=tile.swap,
        STAGES=tile.stages,
        num_warps=tile.warps,
        **launch_options(pdl),
    )
