"""Products of up to tens of tokens with maps in FP8, in the tensor cores of FP8.

A number of bfloat16 is a sum of two numbers of FP8, so that tokens need not be rounded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from headstock.spi import Weight, WeightFormat, WeightKind
from headstock_triton.fp8_rows import GROUP_COLUMNS, REST, Fp8Rows
from headstock_triton.portable import add_product
from headstock_triton.split_sums import (
    PartTile,
    choose_part_tile,
    find_rows,
    make_sums,
    store_sums,
)

DEPTH = 128
"""Columns of a step. The tensor cores of FP8 keep 14 bits of a sum, which ends after so many."""
MOST_PROGRAMS = 400
"""Three for each processor of an H200."""
LEAST_TOKENS = 16
"""Of a tile: with fewer, the compiler takes the older instructions."""


@frozen(kw_only=True, eq=False)
class Fp8Map(Weight):
    """A map that the kernel takes, [out, in] in FP8.

    counters: [tiles of 64 rows] int32, 0: how many parts of a tile's sums are there
    group_scales: those of blocks as `multiply_groups` takes them; None where it takes no such map
    """

    counters: Tensor
    group_scales: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of all that it holds."""
        more = 0 if self.group_scales is None else self.group_scales.nbytes
        return super().nbytes + self.counters.nbytes + more


def can_take(width: int, format: WeightFormat) -> bool:
    """Whether the kernel takes maps of so many columns in a format."""
    columns = width if format.group is None else format.group[1]
    is_fit = columns >= width or columns % DEPTH == 0
    return format.kind is WeightKind.FP8_E4M3 and width % DEPTH == 0 and is_fit


def can_group(outs: int, width: int, format: WeightFormat) -> bool:
    """Whether torch multiplies maps of that size in whole blocks, as `multiply_groups` does."""
    is_block = format.kind is WeightKind.FP8_E4M3 and format.group == (GROUP_COLUMNS, GROUP_COLUMNS)
    # cuBLAS wants four scales of a row of blocks at a time.
    return is_block and outs % GROUP_COLUMNS == 0 and width % (4 * GROUP_COLUMNS) == 0


def make_map(weight: Weight) -> Fp8Map:
    """The map with counters.   weight: [out, in], with scales by groups of rows and columns"""
    return Fp8Map(
        tensor=weight.tensor,
        scales=weight.scales,
        format=weight.format,
        bias=weight.bias,
        counters=weight.tensor.new_zeros(triton.cdiv(len(weight.tensor), 64), dtype=torch.int32),
        group_scales=_make_group_scales(weight),
    )


def _make_group_scales(weight: Weight) -> Tensor | None:
    """The scales of blocks as `multiply_groups` takes them; None for a map in other blocks."""
    assert weight.scales is not None
    assert weight.format is not None
    if not can_group(len(weight.tensor), weight.tensor.shape[1], weight.format):
        return None
    return weight.scales.float().contiguous().t()


@triton.jit(do_not_specialize=("tokens",))
def fp8_kernel(
    values,
    token_scales,
    weight,
    factors,
    bias,
    parts,
    out,
    counters,
    tokens,
    outs,
    WIDTH: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    COLUMN_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    LEFT: tl.constexpr,
    BIAS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile of rows of the weight with all tokens, and one of PARTS parts of its columns.

    values: [2, tokens, WIDTH]    factors: one for each ROW_GROUP rows and COLUMN_GROUP columns
    """
    row, exists = find_rows(outs, ROWS, False)
    token, k = tl.arange(0, TOKENS), tl.arange(0, DEPTH)
    first = tl.program_id(1) * (WIDTH // PARTS)
    # Rows past the end read the last one again, so that loads need no mask for them.
    near = tl.minimum(row, outs - 1)
    groups: tl.constexpr = (WIDTH + COLUMN_GROUP - 1) // COLUMN_GROUP
    row_factors = factors + near // ROW_GROUP * groups
    source = weight + near.to(tl.int64)[:, None] * WIDTH + first + k[None, :]
    coarse = values + token[:, None] * WIDTH + first + k[None, :]
    there = token < tokens
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    factor = tl.load(row_factors + first // COLUMN_GROUP).to(tl.float32)
    for start in tl.range(0, WIDTH // PARTS, DEPTH, num_stages=STAGES):
        w = tl.load(source + start)
        following = factor
        if groups > 1:  # a step ahead, so that no step waits for what is not copied ahead
            group = tl.minimum((first + start + DEPTH) // COLUMN_GROUP, groups - 1)
            following = tl.load(row_factors + group).to(tl.float32)
        value = tl.load(coarse + start, there[:, None], other=0.0)
        rest = tl.load(coarse + tokens * WIDTH + start, there[:, None], other=0.0)
        none = tl.zeros((ROWS, TOKENS), tl.float32)
        product = add_product(w, value.T, none) + add_product(w, rest.T, none) / REST
        if groups > 1:
            product *= factor[:, None]
            factor = following
        sums += product
    if groups == 1:
        sums *= factor[:, None]
    sums *= tl.load(token_scales + token, there, other=0.0)[None, :]
    store_sums(
        sums, bias, parts, out, counters, row, exists, tokens, outs, PARTS, LEFT, BIAS, False
    )


def multiply_exact_rows(
    rows: Fp8Rows,
    weight: Fp8Map,
    *,
    left: bool = False,
    tile: PartTile | None = None,
) -> Tensor:
    """x W^T + b, of rows that are sums of two.

    left: sums may be left in parts; then the weight has no bias
    returns: [tokens, out] bfloat16, or [parts, tokens, out] float32, whose sum over the parts it is
    """
    assert weight.format is not None
    assert weight.format.group is not None
    _, tokens, width = rows.values.shape
    outs = len(weight.tensor)
    if tile is None:
        tile = choose_part_tile(
            tokens, outs, width // DEPTH, MOST_PROGRAMS, least_tokens=LEAST_TOKENS
        )
    assert not (left and weight.bias is not None), "each part would have it"
    out, parts = make_sums(rows.scales, outs, outs, tile, left=left)
    fp8_kernel[(triton.cdiv(outs, tile.rows), tile.parts)](
        rows.values,
        rows.scales,
        weight.tensor,
        weight.scales,
        # A pointer that the kernel without a bias does not read.
        rows.scales if weight.bias is None else weight.bias,
        parts,
        out,
        weight.counters,
        tokens,
        outs,
        WIDTH=width,
        ROW_GROUP=weight.format.group[0],
        COLUMN_GROUP=weight.format.group[1],
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        PARTS=tile.parts,
        LEFT=left,
        BIAS=weight.bias is not None,
        DEPTH=DEPTH,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    return out
