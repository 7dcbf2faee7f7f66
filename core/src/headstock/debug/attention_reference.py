"""Attention in float32, written out: what `--debug-attention` compares every call with."""

from __future__ import annotations

import math

import torch
from attrs import frozen
from torch import Tensor

from headstock.spi import AttentionStep, KVLayer, LayerInfo

MAX_SCORES = 1 << 24
"""Scores that are in memory at once, 64 MiB."""

TOLERANCE = {torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""By the type of the queries, how far an element may be off, as a part of the largest value."""
TOLERANCE_8_BITS = 0.15
"""Where keys and values have 8 bits: some kernels round queries or weights to these too."""


@frozen(eq=False)
class Deviation:
    """The largest deviation of a row: how far off, how far it may be, and at which place of it."""

    row: int
    error: float
    allowed: float
    token: int
    head: int

    @property
    def excess(self) -> float:
        """How many times as far off as it may be."""
        return self.error / self.allowed if self.error == self.error else math.inf


def gather_context(
    step: AttentionStep, layer: LayerInfo, kv: KVLayer, row: int
) -> tuple[Tensor, Tensor]:
    """Gather a row's keys and values through its page table, in float32.

    returns: [context, kv_heads, k_dim], [context, kv_heads, v_dim]
    """
    length = int(step.host_context_lens[row])
    pages = step.page_tables[layer.group][row, : -(-length // kv.page_slots)].long()
    if kv.latent is not None:
        latent = _read_pages(kv.latent, pages)[:length, None]
        return latent, latent[..., : layer.out_dim]
    assert kv.k is not None, "a layer with attention keeps keys and values"
    assert kv.v is not None, "a layer with attention keeps keys and values"
    return _read_pages(kv.k, pages)[:length], _read_pages(kv.v, pages)[:length]


def _read_pages(pool: Tensor, pages: Tensor) -> Tensor:
    """Read pages in float32.   pool: [pages, page, ...]    returns: [tokens, ...]"""
    if pool.dtype.itemsize == 1:  # torch indexes 8-bit floats as bytes only
        rows = pool.view(torch.uint8)[pages].view(pool.dtype)
    else:
        rows = pool[pages]
    return rows.flatten(0, 1).to(torch.float32)


def attend_row(q: Tensor, keys: Tensor, values: Tensor, layer: LayerInfo) -> Tensor:
    """Causal attention of a row's last tokens over its context.

    q: [queries, heads, k_dim]    keys, values: [context, kv_heads, dim] float32
    returns: [queries, heads, v_dim] float32
    """
    queries, heads = q.shape[:2]
    ratio = heads // keys.shape[1]
    keys, values = keys.repeat_interleave(ratio, 1), values.repeat_interleave(ratio, 1)
    other = torch.arange(len(keys), device=q.device)
    first = len(keys) - queries
    parts = []
    most = max(MAX_SCORES // (heads * len(keys)), 1)
    for start in range(0, queries, most):
        part = q[start : start + most].to(torch.float32)
        scores = torch.einsum("qhd,khd->hqk", part, keys) * (layer.scale * layer.k_scale)
        if layer.softcap:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        at = torch.arange(first + start, first + start + len(part), device=q.device)[:, None]
        is_hidden = other > at
        if layer.window is not None:
            is_hidden |= other <= at - layer.window
        scores = scores.masked_fill_(is_hidden, -math.inf)
        if layer.sinks is not None:
            sinks = layer.sinks[:, None, None].expand(-1, len(part), 1)
            scores = torch.cat((scores, sinks), -1)
        weights = scores.softmax(-1)[..., : len(keys)]
        parts.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(parts) * layer.v_scale


def find_deviation(
    q: Tensor, out: Tensor, step: AttentionStep, layer: LayerInfo, kv: KVLayer
) -> tuple[Deviation | None, float]:
    """Find the row of a call that is furthest off.

    Rows whose reference is not finite are left out: their logits tell.

    q: [tokens, heads, dim]    out: [tokens, heads, out_dim], as the backend left it
    step: as it was before the backend saw it
    returns: the row that is further off than it may be; the largest error of the others
    """
    worst: Deviation | None = None
    largest, stop = 0.0, 0
    part = kv.k if kv.latent is None else kv.latent
    narrow = part is not None and part.dtype.itemsize == 1
    tolerance = TOLERANCE_8_BITS if narrow else TOLERANCE[q.dtype]
    for row, count in enumerate(step.host_query_lens.tolist()):
        start, stop = stop, stop + count
        keys, values = gather_context(step, layer, kv, row)
        expected = attend_row(q[start:stop], keys, values, layer)
        if not bool(expected.isfinite().all()):
            continue
        errors = (out[start:stop].to(torch.float32) - expected).abs().amax(-1)
        error = float(errors.nan_to_num(nan=math.inf).max())
        allowed = tolerance * max(float(values.abs().max()) * abs(layer.v_scale), 1e-6)
        if error <= allowed:
            largest = max(largest, error)
            continue
        at = int(errors.nan_to_num(nan=math.inf).argmax())
        token, head = divmod(at, errors.shape[1])
        rows = Deviation(row, error, allowed, token, head)
        if worst is None or rows.excess > worst.excess:
            worst = rows
    return worst, largest
