"""Steps over a pool in which only what rows own is a number, and the attention that a backend must give for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from headstock.spi import (
    AttentionBackend,
    AttentionCapabilities,
    AttentionContext,
    AttentionQuery,
    AttentionStep,
    LayerInfo,
    Phase,
)

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""How far an element may be off, absolute and relative, by type."""

MAX_SEQ_LEN = 2048
"""What backends are built for."""
MAX_ROWS = 64

QUERY = AttentionQuery(
    phases=frozenset(Phase),
    heads=16,
    kv_heads=8,
    head_dim=128,
    q_dtype="bfloat16",
    kv_dtype="bfloat16",
    page_size=None,
    contiguous=False,
    features=frozenset(),
    max_rows=8,
    max_seq_len=100,
)
"""What a decoder in the shape of Qwen3-0.6B asks in bfloat16, of all phases and with pages of any size."""


@frozen(eq=False)
class Case:
    """A step, its pool, and the same keys and values row by row.

    pool: [pages, 2, page_size, kv_heads, head_dim]    q: [tokens, heads, head_dim]
    keys, values: one a row, [context, kv_heads, head_dim]
    """

    pool: Tensor
    step: AttentionStep
    q: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


def step_of(phase: Phase, lens: Sequence[tuple[int, int]], tables: tuple[Tensor, ...]) -> AttentionStep:
    """A step of rows (query tokens, context tokens) with these page tables, on their device."""
    queries, contexts = (np.array(column, np.int32) for column in zip(*lens, strict=True))
    start = np.concatenate([[0], queries.cumsum()]).astype(np.int32)
    device = tables[0].device
    return AttentionStep(
        phase=phase,
        query_start=torch.from_numpy(start).to(device),
        context_lens=torch.from_numpy(contexts.copy()).to(device),
        page_tables=tables,
        host_query_lens=queries,
        host_context_lens=contexts,
    )


def make(
    phase: Phase,
    lens: Sequence[tuple[int, int]],
    *,
    page_size: int = 16,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 128,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    unused: float = math.nan,
    tail: float | None = None,
) -> Case:
    """A case whose pages lie about the pool in random order.

    Pages that no row owns hold `unused`; what is left over of a row's last page holds `tail` (None: the same).
    """
    noise = torch.Generator().manual_seed(seed)
    counts = [-(-context // page_size) for _, context in lens]
    order = (torch.randperm(sum(counts) + 3, generator=noise) + 1).to(torch.int32)
    pool = torch.full((len(order) + 1, 2, page_size, kv_heads, head_dim), unused)
    pool[0] = 1000.0  # the dummy page holds anything finite
    table = torch.zeros(len(lens), max(counts) + 1, dtype=torch.int32)
    rows = []
    first = 0
    for row, ((_, context), count) in enumerate(zip(lens, counts, strict=True)):
        pages = order[first : first + count]
        first += count
        table[row, :count] = pages
        pool[pages.long()] = unused if tail is None else tail
        kept = torch.randn(2, context, kv_heads, head_dim, generator=noise).to(dtype).float()
        places = torch.arange(context)
        pool[pages[places // page_size].long(), :, places % page_size] = kept.transpose(0, 1)
        rows.append(kept.to(device))
    q = torch.randn(sum(query for query, _ in lens), heads, head_dim, generator=noise).to(device, dtype)
    step = step_of(phase, lens, (table.to(device),))
    return Case(pool.to(device, dtype), step, q, tuple(kv[0] for kv in rows), tuple(kv[1] for kv in rows))


def expected(case: Case, layer: LayerInfo) -> tuple[Tensor, Tensor]:
    """Attention and the logarithm of its sums in float32. [tokens, heads, head_dim], [tokens, heads]"""
    answers, sums = [], []
    queries = case.q.float().split(case.step.host_query_lens.tolist())
    for q, k, v in zip(queries, case.keys, case.values, strict=True):
        ratio = q.shape[1] // k.shape[1]
        k, v = (side.float().repeat_interleave(ratio, 1) for side in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * layer.scale
        if layer.softcap:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        at = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
        other = torch.arange(len(k), device=q.device)
        seen = (other <= at) & (other > at - (layer.window or len(k)))
        scores = scores.masked_fill(~seen, -math.inf)
        answers.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        sums.append(scores.logsumexp(-1).t())
    return torch.cat(answers), torch.cat(sums)


def context_of(
    case: Case,
    capabilities: AttentionCapabilities,
    options: Any,
    layers: int = 1,
    max_rows: int = MAX_ROWS,
    max_seq_len: int = MAX_SEQ_LEN,
) -> AttentionContext:
    """What a backend for the case is built from; every layer has the case's pool."""
    _, _, page_size, kv_heads, head_dim = case.pool.shape
    query = AttentionQuery(
        phases=frozenset(Phase),
        heads=case.q.shape[1],
        kv_heads=kv_heads,
        head_dim=head_dim,
        q_dtype=str(case.q.dtype).removeprefix("torch."),
        kv_dtype=str(case.pool.dtype).removeprefix("torch."),
        page_size=page_size,
        contiguous=False,
        features=frozenset(),
        max_rows=max_rows,
        max_seq_len=max_seq_len,
    )
    return AttentionContext(
        query=query,
        capabilities=capabilities,
        device=case.pool.device,
        page_size=page_size,
        pools=dict.fromkeys(range(layers), case.pool),
        max_tokens=4096,
        options=options,
    )


def check(
    backend: AttentionBackend, case: Case, layer: LayerInfo, *, with_lse: bool = False, tolerance: float | None = None
) -> float:
    """The largest error of the backend's answer; asserts that it is small and that the pool is as before."""
    before = case.pool.clone()
    out = torch.full_like(case.q, math.nan)
    lse = torch.full(case.q.shape[:2], math.nan, device=case.q.device) if with_lse else None
    backend.forward(case.q, layer, backend.plan(case.step), out, lse)
    assert torch.equal(case.pool.view(torch.uint8), before.view(torch.uint8))
    answer, sums = expected(case, layer)
    if lse is not None:
        torch.testing.assert_close(lse, sums, atol=1e-2, rtol=1e-3)
    return compare(out, answer, tolerance)


def compare(out: Tensor, answer: Tensor, tolerance: float | None = None) -> float:
    """The largest difference; asserts that none is above `tolerance`, by default what the type of `out` allows."""
    tolerance = tolerance or TOLERANCE[out.dtype]
    torch.testing.assert_close(out.float(), answer, atol=tolerance, rtol=tolerance)
    return float((out.float() - answer).abs().max())


def around(phase: Phase, page_size: int) -> list[tuple[int, int]]:
    """Rows (query tokens, context tokens) whose contexts end at a page's end, one before it and one after it."""
    contexts = [max(1, page_size * pages + more) for pages in (1, 2, 5) for more in (-1, 0, 1)]
    contexts += [1, 2, 777]
    if phase is Phase.PREFILL:
        return [(context, context) for context in contexts]
    if phase is Phase.DECODE:
        return [(1, context) for context in contexts]
    wanted = (1, 5, page_size, 64)
    return [(min(wanted[place % 4], context), context) for place, context in enumerate(contexts)]
