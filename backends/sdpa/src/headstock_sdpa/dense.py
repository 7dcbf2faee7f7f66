"""Attention of padded rows, by torch's kernels or, where those do not apply, in plain
operations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float, causal: bool = False
) -> Tensor:
    """Attention where each KV head serves `heads / kv_heads` query heads.

    q: [rows, heads, queries, head_dim]    k, v: [rows, kv_heads, keys, head_dim]
    mask: broadcasts to [rows, heads, queries, keys], or None
    returns: [rows, heads, queries, head_dim]
    """
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=gqa
    )


def softmax_in_float32(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Same as `sdpa_attention`, in float32, with scores bounded by `softcap` (0: not) and the LSE.

    v: [rows, kv_heads, keys, v_dim]
    returns: [rows, heads, queries, v_dim], [rows, heads, queries] float32
    """
    rows, heads, queries, _ = q.shape
    kv_heads, keys = k.shape[1:3]
    # The query heads of a KV head are adjacent, so its keys are not copied for each of them.
    grouped = q.float().reshape(rows, kv_heads, heads // kv_heads * queries, -1)
    scores = (grouped @ k.float().transpose(2, 3)).mul_(scale).view(rows, heads, queries, keys)
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores.masked_fill_(~mask, float("-inf"))
    probs = scores.softmax(-1).view(rows, kv_heads, -1, keys)
    answer = (probs @ v.float()).view(rows, heads, queries, -1).to(q.dtype)
    return answer, torch.logsumexp(scores, -1)


def write_rows(target: Tensor, order: Tensor | None, rows: Tensor) -> None:
    """Write `rows` to the rows of `target` in `order` (None: all, in order).

    writes: target
    """
    if order is None:
        target.copy_(rows)
    else:
        target.index_copy_(0, order, rows)
