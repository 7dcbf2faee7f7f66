"""The reference attention of a case, in plain float64."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from headstock.spi import LayerInfo
from headstock_conformance.attention.cases import AttentionCase

MAX_QUERIES = 256
"""Number of queries of a row that are computed at once."""


def row_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of a row's last tokens in plain float64, and the logarithm of each query's
    sum without sinks.

    q: [queries, heads, head_dim]    keys, values: [context, kv_heads, head_dim]
    sinks: [heads], or None
    returns: [queries, heads, head_dim], [queries, heads] float64
    """
    ratio = q.shape[1] // keys.shape[1]
    keys, values = (side.double().repeat_interleave(ratio, 1) for side in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(len(keys) - len(q), len(keys), device=q.device)[:, None]
    other = torch.arange(len(keys), device=q.device)
    seen = (other <= at) & (other > at - (window or len(keys)))
    scores = scores.masked_fill(~seen, -math.inf)
    weights = scores.softmax(-1)
    if sinks is not None:
        further = sinks.double()[:, None, None].expand(-1, len(q), 1)
        weights = torch.cat((scores, further), -1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, values), scores.logsumexp(-1).t()


def expected(case: AttentionCase, layer: LayerInfo) -> tuple[Tensor, Tensor]:
    """Attention and the logarithm of its sums. [tokens, heads, head_dim], [tokens, heads],
    float32
    """
    queries = torch.split(case.q, case.step.host_query_lens.tolist())
    parts = [
        row_attention(
            part,
            keys[:stop],
            values[:stop],
            layer.scale,
            layer.window,
            layer.softcap,
            layer.sinks,
        )
        for q, keys, values in zip(queries, case.keys, case.values, strict=True)
        for part, stop in split_queries(q, len(keys))
    ]
    answers, sums = zip(*parts, strict=True)
    return torch.cat(answers).float(), torch.cat(sums).float()


def split_queries(q: Tensor, context: int) -> Iterator[tuple[Tensor, int]]:
    """A row's queries in parts, to bound the scores in memory, and the keys that each part sees."""
    stop = context - len(q)
    for part in torch.split(q, MAX_QUERIES):
        stop += len(part)
        yield part, stop
