"""Decode in float32 on a CPU: one pass over keys and one over values, without gathering them.

Scores are a sampled matrix product of queries by all vectors of the pool. It is only computed where
a CSR pattern says that a query sees a vector. The weighted sum of values is an embedding bag over
the same vectors. Keys and values are never copied, which would cost more than the arithmetic.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from headstock.spi.arrays import Ints
from headstock.spi.attention import LayerInfo
from headstock_sdpa.dense import write_rows
from headstock_sdpa.slots import Visible, sort_into_buckets
from headstock_sdpa.token_rows import TokenRows

MIN_SAVED_ENTRIES = 2048
"""Padded entries (tokens times heads) that cost as much as one more softmax."""
NO_LIMIT = 1 << 62
"""Buckets need no bound on their tokens here: nothing is gathered."""
ZERO, INF = np.float32(0), np.float32("inf")


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
    """Which vectors of `pool.view(-1, head_dim)` each query sees.

    order: [rows]    pattern: CSR [rows * heads, vectors]
    starts: [rows * heads + 1] first entry of each query
    columns: [entries] vectors; both are the pattern's own
    """

    order: Tensor | None
    pattern: Tensor
    starts: Tensor
    columns: Tensor
    parts: tuple[Part, ...]


def allow_csr() -> None:
    """Silence torch's warning, once in a process, that CSR tensors are in beta."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state", UserWarning)
        # torch 2.11
        warnings.filterwarnings(
            "ignore", "Sparse invariant checks are implicitly disabled", UserWarning
        )
        # torch warns once per process, so the first tensor is made here, where the filters apply.
        torch.sparse_csr_tensor([0, 0], [], torch.empty(0), (1, 1), check_invariants=False)


def sparse_index(page_table: Tensor, seen: Visible, tokens: TokenRows, heads: int) -> SparseIndex:
    """The index of a decode step's rows for one group and window.

    Made by numpy: for few rows torch takes longer.
    """
    table_rows, kv_heads, _ = tokens.keys.shape
    order, cuts = sort_into_buckets(seen.lens, max(MIN_SAVED_ENTRIES // heads, 1), NO_LIMIT)
    buckets = [_bucket_slots(page_table.numpy(), rows, seen, tokens) for rows in cuts]
    sizes = np.array([places.shape for places, _ in buckets])
    counts = np.repeat(sizes[:, 1], sizes[:, 0] * heads)
    vectors = table_rows * kv_heads
    # torch requires both arrays of a pattern in one integer type; half the size is half the
    # traffic.
    dtype = np.int32 if max(vectors, int(counts.sum())) < 1 << 31 else np.int64
    starts = np.zeros(len(counts) + 1, dtype)
    counts.cumsum(out=starts[1:])
    columns = [
        _key_vectors(places.astype(dtype, copy=False), heads, kv_heads) for places, _ in buckets
    ]
    first, second = torch.from_numpy(starts), torch.from_numpy(np.concatenate(columns))
    # Not `empty`: beta is 0, but 0 times a NaN is NaN.
    zeros = torch.zeros(len(second))
    pattern = torch.sparse_csr_tensor(
        first, second, zeros, (len(counts), vectors), check_invariants=False
    )
    return SparseIndex(
        order=None if order is None else torch.from_numpy(order),
        pattern=pattern,
        starts=first,
        columns=second,
        parts=tuple(_make_parts(buckets, heads)),
    )


def _bucket_slots(
    page_table: Ints, rows: Ints, seen: Visible, tokens: TokenRows
) -> tuple[Ints, Ints | None]:
    """The slots that some rows see, 0 where padded, and which are not padding (None: all).

    returns: [rows, longest] int32, [rows, longest] bool
    """
    start, lens = seen.start[rows], seen.lens[rows]
    longest = int(lens.max())
    counts = np.arange(longest, dtype=np.int32)
    valid = counts < lens[:, None] if lens.min() < longest else None
    size = tokens.page_size
    pages = page_table[rows, : -(-int(seen.stop[rows].max()) // size), None]
    places = pages * tokens.page_slots + np.arange(size, dtype=np.int32)
    places = places.reshape(len(rows), -1)
    if start.any():
        positions = start[:, None] + counts
        places = np.take_along_axis(places, positions if valid is None else positions * valid, 1)
    places = places[:, :longest]
    return (places if valid is None else places * valid), valid


def _key_vectors(slots: Ints, heads: int, kv_heads: int) -> Ints:
    """The key vectors that each query sees, padding included. [rows * heads * longest]

    slots: [rows, longest]
    """
    vectors = (slots * kv_heads)[:, None] + np.arange(kv_heads, dtype=slots.dtype)[:, None]
    return vectors.repeat(heads // kv_heads, axis=1).ravel()


def _make_parts(buckets: list[tuple[Ints, Ints | None]], heads: int) -> Iterator[Part]:
    """The entries of each bucket, and which are padding."""
    start = 0
    for places, valid in buckets:
        mask = None if valid is None else torch.from_numpy(np.where(valid, ZERO, -INF)[:, None])
        stop = start + places.size * heads
        yield Part(start, stop, places.shape[1], mask)
        start = stop


def sparse_decode(
    q: Tensor,
    tokens: TokenRows,
    index: SparseIndex,
    layer: LayerInfo,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Write the attention of each row's one query.

    q: [rows, heads, head_dim]
    writes: out [rows, heads, head_dim]; lse [rows, heads] float32, unless None
    """
    head_dim = q.shape[-1]
    # A key and its value have the same number.
    table, values = tokens.keys.view(-1, head_dim), tokens.values.view(-1, head_dim)
    queries = (q if index.order is None else q.index_select(0, index.order)).reshape(-1, head_dim)
    # Not into the pattern itself (`out=`): that saves 2 us of 38, but a NaN would stay in the
    # buffer, since 0 times NaN is NaN.
    products = torch.sparse.sampled_addmm(
        index.pattern, queries, table.t(), beta=0.0, alpha=layer.scale
    )
    scores = products.values()
    if layer.softcap:
        scores.div_(layer.softcap).tanh_().mul_(layer.softcap)
    rows = []
    for part in index.parts:
        row = scores[part.start : part.stop].view(-1, part.longest)
        if part.mask is not None:
            row.view(-1, q.shape[1], part.longest).add_(part.mask)
        rows.append(row)
    if len(rows) == 1:
        probs = rows[0].softmax(-1).view(-1)
    else:
        probs = torch.cat([part.softmax(-1).view(-1) for part in rows])
    answer = torch.embedding_bag(values, index.columns, index.starts, False, 0, False, probs, True)[
        0
    ]
    if index.order is None:
        out.copy_(answer.view(q.shape))
    else:
        write_rows(out, index.order, answer.view(q.shape))
    if lse is not None:
        write_rows(
            lse, index.order, torch.cat([part.logsumexp(-1) for part in rows]).view(lse.shape)
        )
