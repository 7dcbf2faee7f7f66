"""Masks of the tokens that may be sampled (`Sampling.mask`)."""

from __future__ import annotations

import math

import triton.language as tl

from headstock_triton.device_function import device_function

INFINITY = tl.constexpr(math.inf)
FEW_ROWS = 16
"""Up to this number of rows, a row is split among more programs."""


@device_function
def forbid(x, mask, start, vocab, words, BLOCK: tl.constexpr):
    """The scores of the tokens start, start + 1, ..., minus infinity where the mask forbids them.

    x: [BLOCK] float32    mask: the row's words    start: a multiple of BLOCK
    """
    num_words: tl.constexpr = (BLOCK + 31) // 32
    at = start + tl.arange(0, BLOCK)
    own = start // 32 + tl.arange(0, num_words)
    free = tl.load(mask + own, own < words, other=-1) == -1
    # Most rows have no rule, so every bit is set: check one word per 32 tokens.
    if tl.min(free.to(tl.int32), 0) == 0:
        word = tl.load(mask + at // 32, at < vocab, other=-1)
        x = tl.where(((word >> (at % 32)) & 1) == 0, -INFINITY, x)
    return x
