"""`headstock.nn.noise` inside kernels: Philox4x32-10 and Gumbel noise, the same numbers."""

from __future__ import annotations

import math

import triton.language as tl

from headstock.nn import noise
from headstock_triton.device_function import device_function
from headstock_triton.portable import fast_log2, log1p

MULTIPLIER_0 = tl.constexpr(noise.MULTIPLIERS[0])
MULTIPLIER_1 = tl.constexpr(noise.MULTIPLIERS[1])
WEYL_0 = tl.constexpr(noise.WEYL[0])
WEYL_1 = tl.constexpr(noise.WEYL[1])
ROUNDS = tl.constexpr(noise.ROUNDS)
LN_2 = tl.constexpr(math.log(2))
SLACK = tl.constexpr(2e-4)
"""Maximum distance of two approximate scores in the wrong order: four times the error of
`guess_gumbel` (3e-5) and of division by the inverse (1e-5).
"""


@device_function
def _philox(c0, c1, c2, c3, k0, k1):
    """The four random words of each counter; all are uint32."""
    for _ in tl.static_range(ROUNDS):
        product_1 = c2.to(tl.uint64) * MULTIPLIER_1
        product_0 = c0.to(tl.uint64) * MULTIPLIER_0
        c0 = (product_1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (product_0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = product_1.to(tl.uint32)
        c3 = product_0.to(tl.uint32)
        # In 64 bits, because the interpreter warns about additions that wrap.
        k0 = (k0.to(tl.uint64) + WEYL_0).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + WEYL_1).to(tl.uint32)
    return c0, c1, c2, c3


@device_function
def philox_words(seed, position, start, BLOCK: tl.constexpr):
    """A random word for each of the token ids start, start + 1, ...; `start` is a multiple of 4.

    seed, position: int64    returns: [BLOCK] uint32
    """
    counter = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = tl.zeros_like(counter)
    place = zero + position.to(tl.uint32)
    w0, w1, w2, w3 = _philox(
        counter, place, zero, zero, seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    )
    # A join interleaves, so this order puts the four words of each counter side by side.
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCK,))


@device_function
def philox_word(seed, position, token):
    """The random words of token ids.   seed, position: int64    returns: uint32 of their shape"""
    zero = tl.zeros((), tl.uint32)
    w0, w1, w2, w3 = _philox(
        (token // 4).to(tl.uint32),
        position.to(tl.uint32),
        zero,
        zero,
        seed.to(tl.uint32),
        (seed >> 32).to(tl.uint32),
    )
    place = token % 4
    return tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3))


@device_function
def gumbel_of(words):
    """Standard Gumbel noise of random words.   words: uint32    returns: float32"""
    u = (words.to(tl.float32) + 0.5) * 2.0**-32
    # 1 would give infinite noise, and float32 rounds the largest words up to it.
    u = tl.minimum(u, 1.0 - 2.0**-24)
    return -tl.log(-log1p(-u))


@device_function
def guess_gumbel(words):
    """`gumbel_of` within `SLACK` / 4, in a fifth of its instructions.   returns: float32"""
    u = tl.minimum(words.to(tl.float32) * 2.0**-32 + 2.0**-33, 1.0 - 2.0**-24)
    # -log(1 - u): if u is small, as for winning noise, 1 - u would lose digits. Four terms are 3e-6
    # short at 1/16.
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * 0.25)))
    waited = tl.where(u < 0.0625, series, fast_log2(1.0 - u) * -LN_2)
    return fast_log2(waited) * -LN_2
