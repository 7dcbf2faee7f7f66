"""Truncation of distributions: top-k, top-p (arXiv 1904.09751) and min-p (arXiv 2407.01082)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_OFF = -math.inf


def apply_min_p(scores: Tensor, min_p: Tensor) -> Tensor:
    """`scores` without tokens less likely than `min_p` times the likeliest.

    scores: [n, vocab]
    min_p: [n]
    """
    return scores.masked_fill(scores < scores.amax(-1, keepdim=True) + min_p.log()[:, None], _OFF)


def apply_top_k_top_p(scores: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """`scores` of the `top_k` best tokens, and of these the fewest whose probability is `top_p`.

    Of equal scores the lower token id is the better. The best token is always kept; top_p of 1
    keeps all.
    scores: [n, vocab] float32    top_k: [n] int64    top_p: [n] float32
    """
    # Stable, so that of equal scores the lower id comes first.
    ranked, ids = scores.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        rank = torch.arange(scores.shape[-1], device=scores.device)
        ranked.masked_fill_(rank >= top_k[:, None], _OFF)
    if top_p is not None:
        # In float64, so that rounding of a long sum does not move the edge; even so it must not cut
        # at top_p = 1.
        probabilities = ranked.softmax(-1, dtype=torch.float64)
        before = probabilities.cumsum(-1).sub_(probabilities)
        beyond = before >= top_p.masked_fill(top_p >= 1, math.inf)[:, None]
        beyond[:, 0] = False  # a top_p too small for float32 is 0 here
        ranked.masked_fill_(beyond, _OFF)
    return torch.empty_like(scores).scatter_(-1, ids, ranked)
