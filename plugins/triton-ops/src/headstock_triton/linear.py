"""Products of a few tokens with a weight: the weight is read once, and at that speed."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headstock_triton.options import MOST_TOKENS
from headstock_triton.portable import add_product, round_to

SINGLE = 4
"""Tokens up to which threads sum products; tensor cores, which take 16 at a time, do the rest."""
TILE = 8192
"""Numbers of the weight that a program asks for at once: 128 bytes a thread."""


@triton.jit
def single_kernel(
    x,
    weight,
    bias,
    out,
    outs,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    SEATS: tl.constexpr,
    BIAS: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some rows of the weight, each read whole before it is summed: no load waits for a sum."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    source = weight + row.to(tl.int64)[:, None] * WIDTH
    exists = row[:, None] < outs
    sums = tl.zeros((SEATS, ROWS), tl.float32)
    token = tl.arange(0, SEATS)[:, None]
    # Unrolled, so that all loads of a row are asked for at once: 128 bytes a thread.
    for step in tl.static_range(STEPS):
        at = step * BLOCK + tl.arange(0, BLOCK)[None, :]
        w = tl.load(source + at, exists & (at < WIDTH), other=0.0).to(tl.float32)
        for index in tl.static_range(TOKENS):
            term = tl.sum(
                w * tl.load(x + index * WIDTH + at, at < WIDTH, other=0.0).to(tl.float32), 1
            )
            sums += tl.where(token == index, term[None, :], 0.0)
    if BIAS:
        sums += tl.load(bias + row, row < outs, other=0.0).to(tl.float32)[None, :]
    there = (token < TOKENS) & (row < outs)[None, :]
    tl.store(out + token * outs + row[None, :], round_to(sums, out.dtype.element_ty), there)


@triton.jit
def few_kernel(
    x,
    weight,
    bias,
    out,
    tokens,
    outs,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
):
    """A program some rows of the weight, with all tokens, in tensor cores."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, MOST)[:, None]
    source = weight + row.to(tl.int64)[None, :] * WIDTH
    sums = tl.zeros((MOST, ROWS), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        at = start + tl.arange(0, BLOCK)
        lhs = tl.load(
            x + token * WIDTH + at[None, :], (token < tokens) & (at < WIDTH)[None, :], other=0.0
        )
        rhs = tl.load(
            source + at[:, None], (row < outs)[None, :] & (at < WIDTH)[:, None], other=0.0
        )
        sums = add_product(lhs, rhs, sums)
    if BIAS:
        sums += tl.load(bias + row, row < outs, other=0.0).to(tl.float32)[None, :]
    there = (token < tokens) & (row < outs)[None, :]
    tl.store(out + token * outs + row[None, :], round_to(sums, out.dtype.element_ty), there)


def small_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b for up to `MOST_TOKENS` tokens, summed in float32.

    x: [tokens, in] of 16 bits    weight: [out, in]    bias: [out]    returns: [tokens, out]
    """
    (tokens, width), outs = x.shape, weight.shape[0]
    out = x.new_empty(tokens, outs)
    x, bias_or_weight = x.contiguous(), weight if bias is None else bias
    if tokens <= SINGLE:
        block = min(4096, triton.next_power_of_2(width))
        rows = max(TILE // block, 1)
        single_kernel[(triton.cdiv(outs, rows),)](
            x,
            weight,
            bias_or_weight,
            out,
            outs,
            WIDTH=width,
            TOKENS=tokens,
            SEATS=triton.next_power_of_2(tokens),
            BIAS=bias is not None,
            STEPS=triton.cdiv(width, block),
            ROWS=rows,
            BLOCK=block,
            num_warps=4,
        )
        return out
    # Behind an option above 1 token: at 2 to 8 tokens torch's products are faster in part, at 16
    # about equal.
    rows = 16 if outs >= 2048 else 8
    few_kernel[(triton.cdiv(outs, rows),)](
        x,
        weight,
        bias_or_weight,
        out,
        tokens,
        outs,
        WIDTH=width,
        BIAS=bias is not None,
        ROWS=rows,
        BLOCK=256,
        MOST=MOST_TOKENS,
        num_warps=1 if rows == 8 else 2,
        num_stages=4,
    )
    return out
