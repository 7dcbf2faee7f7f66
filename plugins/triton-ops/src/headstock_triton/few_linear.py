"""Products of 2 to 16 tokens with wide plain maps, of which several programs share the depth.

The library leaves a fifth of the memory's speed there: its tiles are made for more tokens, and a
narrow product has too few of them for all processors.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headstock.spi import Weight
from headstock_triton.pdl import begin_next, launch_options, wait_for_previous
from headstock_triton.portable import add_product
from headstock_triton.split_linear import MOST_OUTS, SplitTile
from headstock_triton.split_sums import PartTile, find_rows, make_sums, store_sums
from headstock_triton.tiles import is_hopper

MOST_FEW_TOKENS = 16
LEAST_WIDTH = 2048
MOST_WIDE_OUTS = 40_960
"""Rows of a map up to which these products are faster; torch's reads heads of vocabularies well."""
ROWS, DEPTH = 64, 128
"""Of a tile, whose rows are those of Hopper's tensor cores."""
MOST_PROGRAMS = 264
"""Two for each processor of an H200."""


def is_few(x: Tensor, outs: int) -> bool:
    """Whether a product of these tokens with a plain map of so many rows is faster here.

    On an H200 8 tokens of the 8B shape take 15.4, 10.5, 51.5 and 27.1 us for its four products in
    such tiles, and torch's 16.9, 13.1, 58.0 and 31.5; half as wide, as on each of two ranks, 9.1,
    6.1, 29.7 and 15.0 beside 11.7, 7.5, 30.6 and 19.0. (Parts were left for a later kernel to sum.)
    """
    tokens, width = x.shape
    return (
        1 < tokens <= MOST_FEW_TOKENS
        and x.dtype.itemsize == 2
        and width >= LEAST_WIDTH
        and width % DEPTH == 0
        and MOST_OUTS < outs <= MOST_WIDE_OUTS
        and (x.device.type == "cpu" or is_hopper(x.device))
    )


def count_tiles(outs: int) -> int:
    """The counters that a product with a map of so many rows needs."""
    return -(-outs // ROWS)


def choose_few_tile(tokens: int, width: int, outs: int) -> PartTile:
    """The tile of a product that `is_few`."""
    tiles, steps = count_tiles(outs), width // DEPTH
    parts = (n for n in (4, 3, 2) if steps % n == 0 and tiles * n <= MOST_PROGRAMS)
    seats = 8 if tokens <= 8 else 16
    return PartTile(rows=ROWS, tokens=seats, parts=next(parts, 1), warps=4, stages=3)


def choose_few_gated_tile(tokens: int) -> SplitTile:
    """The tile of a product of gate and up that `is_few`."""
    return SplitTile(tokens=8 if tokens <= 8 else 16, rows=ROWS, depth=DEPTH, stages=3, swap=True)


# The number of tokens changes between steps.
@triton.jit(do_not_specialize=("tokens",))
def few_tokens_kernel(
    x,
    weight,
    bias,
    parts,
    out,
    counters,
    tokens,
    outs,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of rows of the weight with all tokens, and one of PARTS parts of its depth."""
    begin_next(PDL)
    row, exists = find_rows(outs, ROWS, False)
    token, k = tl.arange(0, TOKENS), tl.arange(0, DEPTH)
    first = tl.program_id(1) * (WIDTH // PARTS)
    # Rows past the end read the last one again, so that loads need no mask for them.
    near = tl.minimum(row, outs - 1)
    source = weight + near.to(tl.int64)[:, None] * WIDTH + first + k[None, :]
    values = x + token[:, None] * WIDTH + first + k[None, :]
    there = (token < tokens)[:, None]
    wait_for_previous(PDL)
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in tl.range(0, WIDTH // PARTS, DEPTH, num_stages=STAGES):
        value = tl.load(values + start, there, other=0.0)
        sums = add_product(tl.load(source + start), value.T, sums)
    store_sums(
        sums, bias, parts, out, counters, row, exists, tokens, outs, PARTS, False, BIAS, False
    )


def multiply_few(
    x: Tensor, weight: Weight, counters: Tensor, *, tile: PartTile | None = None, pdl: bool = False
) -> Tensor:
    """x W^T + b, for up to `MOST_FEW_TOKENS` tokens.

    x: [tokens, in] of 16 bits    weight: [out, in], plain
    counters: [tiles] int32, 0, and 0 again afterwards; products in turn may share them
    returns: [tokens, out]
    """
    (tokens, width), outs = x.shape, len(weight.tensor)
    tile = tile or choose_few_tile(tokens, width, outs)
    assert len(counters) >= count_tiles(outs), "each tile has a counter"
    out, parts = make_sums(x, outs, outs, tile, left=False, dtype=x.dtype)
    few_tokens_kernel[(triton.cdiv(outs, tile.rows), tile.parts)](
        x.contiguous(),
        weight.tensor,
        # A pointer that the kernel without a bias does not read.
        weight.tensor if weight.bias is None else weight.bias,
        parts,
        out,
        counters,
        tokens,
        outs,
        WIDTH=width,
        DEPTH=DEPTH,
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        PARTS=tile.parts,
        BIAS=weight.bias is not None,
        STAGES=tile.stages,
        num_warps=tile.warps,
        **launch_options(pdl),
    )
    return out
