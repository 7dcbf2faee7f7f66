"""Attention over two parts of a context made one: each weighted by its sum of exponentials."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_prefixes(
    out: Tensor, lse: Tensor, prefix_out: Tensor, prefix_lse: Tensor, shared_lens: Tensor
) -> None:
    """Merge attention over shared prefixes into that over the rest of each row's tokens.

    Rows that share nothing stay as they are; what the prefix's tensors hold for them is not used,
    and may be undefined.

    out, prefix_out: [rows, heads, head_dim]    lse, prefix_lse: [rows, heads] float32
    shared_lens: [rows] int32
    writes: out; lse, natural logarithms of the sums over both parts
    """
    # One maximum for both, so that no exponential overflows (Milakov and Gimelshein, 2018,
    # arXiv:1805.02867). `where` and not a product with 0: undefined numbers may be NaN.
    is_shared = (shared_lens > 0)[:, None]
    total = torch.logaddexp(prefix_lse, lse)
    weight, rest = (prefix_lse - total).exp_(), (lse - total).exp_()
    merged = weight[..., None] * prefix_out.float() + rest[..., None] * out.float()
    out.copy_(torch.where(is_shared[..., None], merged.to(out.dtype), out))
    lse.copy_(torch.where(is_shared, total, lse))
