"""Decode in float32 on a CPU: one pass over keys and one over values, without gathering them.

Scores are a sampled matrix product: queries by all vectors of the pool, computed only where a CSR pattern says that a
query sees a vector. The weighted sum of values is an embedding bag over the same vectors. A copy of keys and values,
which costs more than the arithmetic, is never made.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from attrs import frozen
from torch import Tensor

from headstock.spi.attention import LayerInfo
from headstock_sdpa.slots import Bucket, Visible, decode_buckets

ENTRIES = 4096
"""Padded entries (tokens times heads) that are worth one more softmax."""
MOST = 1 << 62
"""Buckets need no bound on their tokens here: nothing is gathered."""


@frozen(eq=False)
class SparseIndex:
    """Which vectors of `pool.view(-1, head_dim)` each query sees, in the order of `order` (None: the batch's own).

    order: [rows]    pattern: CSR [rows * heads, vectors]    mask: [entries], 0 or -inf; None when nothing is padded
    `spans` are the buckets' (start, stop, longest) among the entries.
    """

    order: Tensor | None
    pattern: Tensor
    mask: Tensor | None
    spans: tuple[tuple[int, int, int], ...]


def allow_csr() -> None:
    """CSR tensors can be made from here on without a warning: torch says once in a process that they are in beta."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state", UserWarning)
        torch.sparse_csr_tensor([0, 0], [], torch.empty(0), (1, 1), check_invariants=False)


def sparse_index(page_table: Tensor, seen: Visible, pool: Tensor, heads: int) -> SparseIndex:
    """The index of a decode step's rows for one group and window."""
    page_size, kv_heads, head_dim = pool.shape[2:]
    order, buckets = decode_buckets(page_table, seen, page_size, max(ENTRIES // heads, 1), MOST)
    vectors = pool.numel() // head_dim
    columns = torch.cat([entries(bucket, heads, kv_heads) for bucket in buckets])
    counts = torch.cat([torch.full((len(bucket.slots) * heads,), bucket.slots.shape[1]) for bucket in buckets])
    starts = torch.zeros(len(counts) + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=starts[1:])
    small = torch.int32 if max(vectors, len(columns)) < 1 << 31 else torch.int64
    size = (len(counts), vectors)
    return SparseIndex(
        torch.from_numpy(order) if len(buckets) > 1 else None,
        torch.sparse_csr_tensor(
            starts.to(small), columns.to(small), torch.zeros(len(columns)), size, check_invariants=False
        ),
        masks(buckets, heads),
        tuple(spans(buckets, heads)),
    )


def entries(bucket: Bucket, heads: int, kv_heads: int) -> Tensor:
    """The key vectors that the bucket's queries see, padding included. [rows * heads * longest]"""
    vectors = bucket.slots[:, None, :] * kv_heads + torch.arange(kv_heads, dtype=bucket.slots.dtype)[:, None]
    rows, _, longest = vectors.shape
    return vectors[:, :, None].expand(rows, kv_heads, heads // kv_heads, longest).flatten()


def masks(buckets: tuple[Bucket, ...], heads: int) -> Tensor | None:
    """0 at the entries that are seen and -inf at padding, or None without padding. [entries]"""
    if all(bucket.valid is None for bucket in buckets):
        return None
    parts = []
    for bucket in buckets:
        valid = torch.ones_like(bucket.slots, dtype=torch.bool) if bucket.valid is None else bucket.valid
        part = torch.zeros(valid.shape).masked_fill_(~valid, float("-inf"))
        parts.append(part[:, None].expand(-1, heads, -1).flatten())
    return torch.cat(parts)


def spans(buckets: tuple[Bucket, ...], heads: int) -> Iterator[tuple[int, int, int]]:
    """Where each bucket's entries start and stop, and how long its rows are."""
    start = 0
    for bucket in buckets:
        rows, longest = bucket.slots.shape
        stop = start + rows * heads * longest
        yield start, stop, longest
        start = stop


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
    if index.mask is not None:
        scores.add_(index.mask)
    parts = [scores[start:stop].view(-1, longest) for start, stop, longest in index.spans]
    probs = torch.cat([part.softmax(-1).flatten() for part in parts]) if len(parts) > 1 else parts[0].softmax(-1)
    columns, starts = index.pattern.col_indices(), index.pattern.crow_indices()
    answer = torch.embedding_bag(values, columns, starts, False, 0, False, probs.view(-1), True)[0]
    put(out, index.order, answer)
    if lse is not None:
        put(lse, index.order, torch.cat([part.logsumexp(-1) for part in parts]))


def put(target: Tensor, order: Tensor | None, rows: Tensor) -> None:
    """Write `rows`, which are in `order` and may be flat, to their places in `target`.   writes: target"""
    if order is None:
        target.copy_(rows.view(target.shape))
    else:
        target.index_copy_(0, order, rows.view(target.shape))
