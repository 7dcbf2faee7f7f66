"""Masks of the tokens that may be sampled (`Sampling.mask`)."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from headstock_triton.pdl import begin_next, launch_options, wait_for_previous

INFINITY = tl.constexpr(math.inf)


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


@triton.jit(do_not_specialize_on_alignment=("mask",))
def mask_kernel(
    logits,
    mask,
    vocab,
    stride,
    words,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Minus infinity for the tokens of a part of a row that its mask does not allow."""
    begin_next(PDL)
    wait_for_previous(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(mask + row * words + at // 32, at < vocab, other=-1)
    # Rows without a rule of their own have every bit set: nothing of their logits is touched.
    banned = ((word >> (at % 32)) & 1) == 0
    nothing = tl.full((BLOCK,), -INFINITY, tl.float32)
    tl.store(logits + row * stride + at, nothing, banned & (at < vocab))


def apply_mask_(logits: Tensor, mask: Tensor, *, pdl: bool = False) -> None:
    """Minus infinity for all tokens that a mask, as `Sampling.mask`, does not allow.

    logits: [n, vocab] of any float type
    writes: logits
    """
    rows, vocab = logits.shape
    mask = mask.contiguous()
    block = min(4096, triton.next_power_of_2(max(vocab, 16)))
    if rows:
        mask_kernel[(rows, triton.cdiv(vocab, block))](
            logits,
            mask,
            vocab,
            logits.stride(0),
            mask.shape[1],
            BLOCK=block,
            num_warps=8,
            **launch_options(pdl),
        )
