"""Decode in float32 on a CPU: one pass over keys and one over values, without gathering them.

Scores are a sampled matrix product: queries by all vectors of the pool, computed only where a CSR pattern says that a
query sees a vector. The weighted sum of values is an embedding bag over the same vectors. A copy of keys and values,
which costs more than the arithmetic, is never made.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from headstock.spi.attention import LayerInfo
from headstock_sdpa.dense import put
from headstock_sdpa.slots import Bucket, Visible, decode_buckets

ENTRIES = 2048
"""Padded entries (tokens times heads) that are worth one more softmax."""
MOST = 1 << 62
"""Buckets need no bound on their tokens here: nothing is gathered."""


@frozen(eq=False)
class Part:
    """One bucket's entries, `start` to `stop`, as [rows * heads, longest].

    mask: [rows, 1, longest], 0 or -inf; None when nothing is padded
    """

    start: int
    stop: int
    longest: int
    mask: Tensor | None


@frozen(eq=False)
class SparseIndex:
    """Which vectors of `pool.view(-1, head_dim)` each query sees, in the order of `order` (None: the batch's own).

    order: [rows]    pattern: CSR [rows * heads, vectors]
    starts: [rows * heads + 1] first entry of each query    columns: [entries] vectors; both are the pattern's own
    """

    order: Tensor | None
    pattern: Tensor
    starts: Tensor
    columns: Tensor
    parts: tuple[Part, ...]


def allow_csr() -> None:
    """CSR tensors can be made from here on without a warning: torch says once in a process that they are in beta."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state", UserWarning)
        warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled", UserWarning)  # torch 2.11
        torch.sparse_csr_tensor([0, 0], [], torch.empty(0), (1, 1), check_invariants=False)


def sparse_index(page_table: Tensor, seen: Visible, pool: Tensor, heads: int) -> SparseIndex:
    """The index of a decode step's rows for one group and window."""
    page_size, kv_heads, head_dim = pool.shape[2:]
    order, buckets = decode_buckets(page_table, seen, page_size, max(ENTRIES // heads, 1), MOST)
    vectors = pool.numel() // head_dim
    rows, lengths = zip(*(bucket.slots.shape for bucket in buckets), strict=True)
    counts = np.repeat(lengths, rows).repeat(heads)
    # torch wants both arrays of a pattern in one integer type; half the size is half the traffic.
    is_small = max(vectors, int(counts.sum())) < 1 << 31
    starts = np.zeros(len(counts) + 1, np.int32 if is_small else np.int64)
    counts.cumsum(out=starts[1:])
    first = torch.from_numpy(starts)
    columns = torch.cat([entries(bucket.slots.to(first.dtype), heads, kv_heads) for bucket in buckets])
    zeros = torch.zeros(columns.shape)
    pattern = torch.sparse_csr_tensor(first, columns, zeros, (len(counts), vectors), check_invariants=False)
    return SparseIndex(order, pattern, first, columns, tuple(parts(buckets, heads)))


def entries(slots: Tensor, heads: int, kv_heads: int) -> Tensor:
    """The key vectors that each query sees, padding included. [rows * heads * longest]

    slots: [rows, longest]
    """
    rows, longest = slots.shape
    vectors = (slots * kv_heads)[:, None] + torch.arange(kv_heads, dtype=slots.dtype)[:, None]
    return vectors[:, :, None].expand(rows, kv_heads, heads // kv_heads, longest).reshape(-1)


def parts(buckets: tuple[Bucket, ...], heads: int) -> Iterator[Part]:
    """Where each bucket's entries are, and what is padding among them."""
    start = 0
    for bucket in buckets:
        rows, longest = bucket.slots.shape
        mask = None
        if bucket.valid is not None:
            mask = torch.zeros(rows, 1, longest).masked_fill_(~bucket.valid[:, None], float("-inf"))
        yield Part(start, start + rows * heads * longest, longest, mask)
        start += rows * heads * longest


def sparse_decode(
    q: Tensor, pool: Tensor, index: SparseIndex, layer: LayerInfo, out: Tensor, lse: Tensor | None
) -> None:
    """Write the attention of each row's one query.

    q: [rows, heads, head_dim]    pool: [pages, 2, page_size, kv_heads, head_dim]
    writes: out [rows, heads, head_dim]; lse [rows, heads] float32, unless None
    """
    _, _, page_size, kv_heads, head_dim = pool.shape
    table = pool.view(-1, head_dim)
    values = table[page_size * kv_heads :]  # so that a key's number is its value's too
    queries = (q if index.order is None else q.index_select(0, index.order)).reshape(-1, head_dim)
    found = torch.sparse.sampled_addmm(index.pattern, queries, table.t(), beta=0.0, alpha=layer.scale)
    scores = found.values()
    if layer.softcap:
        scores.div_(layer.softcap).tanh_().mul_(layer.softcap)
    rows = [masked(scores, part, q.shape[1]) for part in index.parts]
    probs = torch.cat([part.softmax(-1).view(-1) for part in rows]) if len(rows) > 1 else rows[0].softmax(-1).view(-1)
    answer = torch.embedding_bag(values, index.columns, index.starts, False, 0, False, probs, True)[0]
    put(out, index.order, answer.view(q.shape))
    if lse is not None:
        put(lse, index.order, torch.cat([part.logsumexp(-1) for part in rows]).view(lse.shape))


def masked(scores: Tensor, part: Part, heads: int) -> Tensor:
    """A part's scores with -inf at padding. [rows * heads, longest]   writes: scores"""
    rows = scores[part.start : part.stop]
    if part.mask is not None:
        rows.view(-1, heads, part.longest).add_(part.mask)
    return rows.view(-1, part.longest)
