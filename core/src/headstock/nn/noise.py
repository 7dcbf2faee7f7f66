"""Noise as a pure function of (seed, position, token).

Philox4x32-10 (Salmon et al., SC 2011), exact in int64.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """The four random words of each counter under its key; all words are int64 below 2^32.

    counter: [4, ...]
    key: [2, ...], its dimensions after the first broadcast with the counter's
    returns: [4, ...]
    """
    shape = (2, *[1] * (counter.dim() - 1))
    # Constants are made on the device: a copy from the host cannot be part of a CUDA graph.
    first = torch.arange(2, device=counter.device) == 0
    multipliers = torch.where(first, *MULTIPLIERS).view(shape)
    rounds = torch.arange(ROUNDS, device=counter.device)[:, None] * torch.where(first, *WEYL)
    even, odd = counter[0::2], counter[1::2]
    for round_key in (rounds.view(ROUNDS, *shape) + key).bitwise_and_(_MASK):
        # Products wrap modulo 2^64; the mask after the shift removes the sign that wrapping may
        # leave.
        product = (even * multipliers).flip(0)
        even = (product >> 32).bitwise_and_(_MASK).bitwise_xor_(odd).bitwise_xor_(round_key)
        odd = product.bitwise_and_(_MASK)
    return torch.stack((even, odd), 1).flatten(0, 1)


def random_words(seeds: Tensor, positions: Tensor, vocab: int, offset: int = 0) -> Tensor:
    """A random 32-bit word for each of `vocab` token ids from `offset` on at each (seed, position).

    It is lane `id & 3` of counter (id >> 2, position, 0, 0) under key (low half of the seed, high
    half).
    seeds, positions: [n] int64    returns: [n, vocab] int64 below 2^32
    """
    first, stop = offset // 4, (offset + vocab + 3) // 4
    blocks = torch.arange(first, stop, device=seeds.device).expand(len(seeds), -1)
    zeros = torch.zeros_like(blocks)
    counter = torch.stack((blocks, positions[:, None].expand_as(blocks), zeros, zeros))
    key = torch.stack((seeds & _MASK, (seeds >> 32) & _MASK))[:, :, None]
    return (
        philox(counter, key).permute(1, 2, 0).reshape(len(seeds), -1).narrow(1, offset % 4, vocab)
    )


def gumbel(seeds: Tensor, positions: Tensor, vocab: int, offset: int = 0) -> Tensor:
    """Standard Gumbel noise, always finite: arg-max of noise plus logits samples their softmax.

    offset: the first of the token ids, so that a shard of the vocabulary has its part of the noise

    seeds, positions: [n] int64    returns: [n, vocab] float32
    """
    # The tail that decides samples is at u near 0, where float32 is finest; u = 1 would give minus
    # infinity.
    u = (
        random_words(seeds, positions, vocab, offset)
        .float()
        .add_(0.5)
        .mul_(2.0**-32)
        .clamp_(max=1 - 2.0**-24)
    )
    return u.neg_().log1p_().neg_().log_().neg_()
