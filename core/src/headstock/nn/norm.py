"""Root-mean-square normalization (Zhang and Sennrich 2019, arXiv 1910.07467)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` over the root of its mean square, times `weight`.

    x, result: [..., n]    weight: [n]
    """
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each head of `x` normalized by itself, times that head's weight.

    x, result: [tokens, heads, head_dim]    weight: [heads, head_dim]
    """
    return F.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)
