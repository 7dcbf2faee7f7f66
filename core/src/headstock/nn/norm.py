"""Root-mean-square normalization (Zhang and Sennrich 2019, arXiv 1910.07467)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` over the root of its mean square, times `weight`.

    A weight in float32 multiplies before a result in 16 bits is rounded.
    x, result: [..., n]    weight: [n]
    """
    if weight.dtype != x.dtype:
        return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each head of `x` normalized by itself, times that head's weight; else as `rms_norm`.

    x, result: [tokens, heads, head_dim]    weight: [heads, head_dim]
    """
    if weight.dtype != x.dtype:
        return F.rms_norm(x.float(), x.shape[-1:], None, eps).mul_(weight).to(x.dtype)
    # The weight comes after, because torch's norm takes one for all heads.
    return F.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)
