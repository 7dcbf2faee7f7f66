"""The gated delta rule: attention whose memory is one matrix a head, however long a sequence is.

Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv:2412.06464.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from headstock.spi import Batch, DeltaRule

SMALLEST_NORM = 1e-6


def apply_delta_rule_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    pages: Tensor,
    batch: Batch,
) -> Tensor:
    """What a step's queries read from the memories of their sequences, after each token's update.

    Token by token, in float32, and each row by itself, so a chunk or a neighbour changes no bit.
    A row that begins does not read what its page holds.

    q, k: [tokens, key_heads, key_dim]    v, result: [tokens, value_heads, value_dim]
    decay: [tokens, value_heads] float32, of which the memory is multiplied by the exponential
    beta: [tokens, value_heads] float32, how much of a value is written
    pages: [rows] int64
    writes: state [pages, value_heads, key_dim, value_dim] float32, at the rows' pages
    """
    repeats = v.shape[1] // k.shape[1]
    q, k = (_normalize(each).repeat_interleave(repeats, 1) for each in (q, k))
    q = q * q.shape[-1] ** -0.5
    # By `where` and not a product with 0: what another sequence left behind may be NaN.
    memory = torch.where((batch.starts == 0)[:, None, None, None], 0, state[pages])
    values, factors = v.float(), decay.exp()
    if batch.max_query_len == 1 and len(pages) == len(q):
        out = _update_(memory, q, k, values, factors, beta)
        state[pages] = memory
        return out.to(v.dtype)
    # One token of every row at a time. A row that has no more learns nothing, and what it reads
    # goes to a place of its own: a graph may capture this, which never reads the device.
    out = values.new_zeros(len(values) + 1, *values.shape[1:])
    starts, counts = batch.query_start[:-1].long(), batch.query_start.diff()
    for index in range(batch.max_query_len):
        is_there = counts > index
        at = torch.where(is_there, starts + index, 0)
        updated = memory.clone()
        read = _update_(updated, q[at], k[at], values[at], factors[at], beta[at])
        memory = torch.where(is_there[:, None, None, None], updated, memory)
        out[torch.where(is_there, at, len(values))] = read
    state[pages] = memory
    return out[:-1].to(v.dtype)


def split_heads(x: Tensor, delta: DeltaRule) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, by head.   x: [tokens, channels]"""
    keys = delta.key_heads * delta.key_dim
    shape = (len(x), delta.key_heads, delta.key_dim)
    q, k, v = x[:, :keys], x[:, keys : 2 * keys], x[:, 2 * keys :]
    return q.reshape(shape), k.reshape(shape), v.reshape(len(x), -1, delta.value_dim)


def _update_(
    memory: Tensor, q: Tensor, k: Tensor, v: Tensor, factors: Tensor, beta: Tensor
) -> Tensor:
    """What queries read from memories that forget, and then learn one token each.

    memory: [rows, heads, key_dim, value_dim]    q, k: [rows, heads, key_dim]
    v, result: [rows, heads, value_dim]    factors, beta: [rows, heads]
    writes: memory
    """
    memory.mul_(factors[..., None, None])
    known = (memory * k[..., None]).sum(-2)
    learned = (v - known) * beta[..., None]
    memory.add_(k[..., None] * learned[..., None, :])
    read: Tensor = (memory * q[..., None]).sum(-2)
    return read


def _normalize(x: Tensor) -> Tensor:
    """Vectors of length 1, in float32."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + SMALLEST_NORM)


def make_decay(a: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
    """The logarithm of what memories keep.

    a: [tokens, value_heads]    rate, bias: [value_heads] float32    returns: as `a`, float32
    """
    return -rate * F.softplus(a.float() + bias)


def normalize_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each head's norm, times the gate's silu.   x, gate: [tokens, heads, dim]   weight: [dim]"""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * normed.to(x.dtype) * F.silu(gate.float())).to(x.dtype)
