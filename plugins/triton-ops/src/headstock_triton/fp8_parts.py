"""Products of tens to hundreds of tokens rounded to FP8 with maps of few rows, in parts (Hopper).

A product with whole sums has a program for 128 tokens and 128 rows: 32 for a map of 4,096 rows and
128 tokens, where a GPU has 132 processors.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headstock.spi import Weight
from headstock_triton.fp8_rows import Fp8Rows
from headstock_triton.portable import add_product
from headstock_triton.split_sums import PartTile

TOKENS = 128
"""Of a tile."""
MOST_TOKENS = 256
"""Of a product that was measured to be faster in parts."""
DEPTH = 128
_STAGES = 5


@triton.jit(do_not_specialize=("tokens",))
def parts_kernel(
    values,
    weight,
    token_scales,
    row_scales,
    out,
    tokens,
    outs,
    STEPS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile of tokens and rows of the weight, and STEPS times DEPTH of their columns."""
    block, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = part * (STEPS * DEPTH)
    sums = tl.zeros((TOKENS, ROWS), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        x = values.load([block * TOKENS, first + step * DEPTH])
        w = weight.load([tile * ROWS, first + step * DEPTH])
        sums = add_product(x, w.T, sums)
    token = block * TOKENS + tl.arange(0, TOKENS)
    row = tile * ROWS + tl.arange(0, ROWS)
    there = token < tokens
    sums *= tl.load(token_scales + token, there, other=0.0)[:, None]
    sums *= tl.load(row_scales + row)[None, :]
    place = out + (part * tokens + token).to(tl.int64)[:, None] * outs + row[None, :]
    tl.store(place, sums, there[:, None])


def choose_rounded_tile(tokens: int, outs: int, width: int, *, processors: int) -> PartTile | None:
    """The tile of a product whose parts fill the device; None where whole sums are as fast.

    On an H200 products of 96, 128, 200 and 256 tokens with 4,096 x 4,096 and 4,096 x 12,288 numbers
    take 31, 29, 36 and 37 us in parts and 64, 48, 48 and 47 whole.
    """
    if tokens > MOST_TOKENS or outs % TOKENS or width % DEPTH:
        return None
    blocks = triton.cdiv(tokens, TOKENS)
    # Fewer parts of narrow tiles come first, as the sums of all parts are read again.
    for rows in (64, 128)[blocks - 1 :]:
        programs = blocks * outs // rows
        fit = (n for n in (4, 2) if width % (n * DEPTH) == 0 and n * programs <= processors)
        parts = next(fit, 1)
        if parts > 1:
            warps = rows // 16
            return PartTile(rows=rows, tokens=TOKENS, parts=parts, warps=warps, stages=_STAGES)
    return None


def multiply_in_rounded_parts(rows: Fp8Rows, weight: Weight, tile: PartTile) -> Tensor:
    """Terms whose sum is x W^T, of rows rounded by row.

    weight: [out, in] in FP8 by row, without a bias
    returns: [parts, tokens, out] float32
    """
    assert weight.scales is not None
    (tokens, width), outs = rows.values.shape, len(weight.tensor)
    out = rows.scales.new_empty(tile.parts, tokens, outs)
    parts_kernel[(triton.cdiv(tokens, tile.tokens), outs // tile.rows, tile.parts)](
        TensorDescriptor.from_tensor(rows.values, [tile.tokens, DEPTH]),
        TensorDescriptor.from_tensor(weight.tensor, [tile.rows, DEPTH]),
        rows.scales,
        weight.scales,
        out,
        tokens,
        outs,
        STEPS=width // DEPTH // tile.parts,
        TOKENS=tile.tokens,
        ROWS=tile.rows,
        DEPTH=DEPTH,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    return out
