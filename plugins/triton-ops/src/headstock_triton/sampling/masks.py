"""Masks of the tokens that may be sampled (`Sampling.mask`)."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from headstock_triton.pdl import begin_next, launch_options, wait_for_previous

INFINITY = tl.constexpr(math.inf)
FEW_ROWS = 16
"""Up to here a row is shared out among more programs."""


@triton.jit
def forbid(x, mask, start, vocab, words, BLOCK: tl.constexpr):
    """The scores of the tokens start, start + 1, ..., minus infinity where the mask forbids them.

    x: [BLOCK] float32    mask: the row's words    start: a multiple of BLOCK
    """
    num_words: tl.constexpr = (BLOCK + 31) // 32
    at = start + tl.arange(0, BLOCK)
    own = start // 32 + tl.arange(0, num_words)
    free = tl.load(mask + own, own < words, other=-1) == -1
    # Most rows have no rule, and every bit set: one word for each 32 tokens tells.
    if tl.min(free.to(tl.int32), 0) == 0:
        word = tl.load(mask + at // 32, at < vocab, other=-1)
        x = tl.where(((word >> (at % 32)) & 1) == 0, -INFINITY, x)
    return x


@triton.jit(do_not_specialize_on_alignment=("mask", "rows"))
def mask_kernel(
    logits,
    mask,
    rows,
    vocab,
    stride,
    words,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Minus infinity for those of `SPAN` tokens of a row that its mask does not allow."""
    begin_next(PDL)
    wait_for_previous(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = mask + (tl.load(rows + row) if ROWS else row) * words
    own = part * (SPAN // 32) + tl.arange(0, SPAN // 32)
    free = tl.load(source + own, own < words, other=-1) == -1
    # Most rows have no rule, and every bit set: nothing of their logits is touched.
    if tl.min(free.to(tl.int32), 0) == 0:
        for start in range(0, SPAN, BLOCK):
            at = part * SPAN + start + tl.arange(0, BLOCK)
            word = tl.load(source + at // 32, at < vocab, other=-1)
            banned = ((word >> (at % 32)) & 1) == 0
            nothing = tl.full((BLOCK,), -INFINITY, tl.float32)
            tl.store(logits + row * stride + at, nothing, banned & (at < vocab))


def apply_mask_(
    logits: Tensor, mask: Tensor, rows: Tensor | None = None, *, pdl: bool = False
) -> None:
    """Minus infinity for all tokens that a mask, as `Sampling.mask`, does not allow.

    logits: [n, vocab] of any float type
    rows: [n] int64, which rows of the mask are theirs; None for the same ones
    writes: logits
    """
    count, vocab = logits.shape
    mask = mask.contiguous()
    # A program looks at the bits of many tokens, since it seldom has more to do.
    span = min(32768 if count > FEW_ROWS else 4096, triton.next_power_of_2(max(vocab, 32)))
    if count:
        mask_kernel[(count, triton.cdiv(vocab, span))](
            logits,
            mask,
            mask if rows is None else rows,
            vocab,
            logits.stride(0),
            mask.shape[1],
            ROWS=rows is not None,
            SPAN=span,
            BLOCK=min(span, 4096),
            num_warps=8,
            **launch_options(pdl),
        )
