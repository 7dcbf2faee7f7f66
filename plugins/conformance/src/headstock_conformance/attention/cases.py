"""Steps over a pool with numbers only where rows own them, and the attention expected for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from attrs import evolve, fields_dict, frozen
from torch import Tensor

from headstock.spi import (
    AttentionContext,
    AttentionQuery,
    AttentionStep,
    FullKV,
    GroupQuery,
    KVLayer,
    LatentKV,
    LayerInfo,
    Layout,
    Phase,
)

MAX_SEQ_LEN = 2048
"""The model query that backends are built for."""
MAX_ROWS = 64

QUERY = AttentionQuery(
    phases=frozenset(Phase),
    groups=(
        GroupQuery(
            layout=FullKV(kv_heads=8, k_dim=128, v_dim=128),
            heads=16,
            q_dtype="bfloat16",
            kv_dtype="bfloat16",
            window=None,
            features=frozenset(),
        ),
    ),
    page_size=None,
    contiguous=False,
    max_rows=8,
    max_seq_len=100,
)
"""The query of a decoder in the shape of Qwen3-0.6B in bfloat16, for all phases and page sizes.
"""


def query(**changes: Any) -> AttentionQuery:
    """`QUERY` with these changes, of itself or of its one group."""
    (group,) = QUERY.groups
    kv_heads = changes.pop("kv_heads", 8)
    head_dim = changes.pop("head_dim", 128)
    changes.setdefault("layout", FullKV(kv_heads=kv_heads, k_dim=head_dim, v_dim=head_dim))
    names = [name for name in changes if name in fields_dict(GroupQuery)]
    group = evolve(
        group,
        **{name: changes.pop(name) for name in names},
    )
    return evolve(QUERY, groups=(group,), **changes)


@frozen(eq=False)
class AttentionCase:
    """A step, its pool, and the same keys and values row by row.

    pool: [pages, 2, page_size, kv_heads, head_dim], or [pages, page_size, dim] of latent vectors
    q: [tokens, heads, head_dim]
    keys, values: one a row, [context, kv_heads, head_dim]
    """

    pool: Tensor
    step: AttentionStep
    q: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


def step_of(
    phase: Phase, lens: Sequence[tuple[int, int]], tables: tuple[Tensor, ...]
) -> AttentionStep:
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
) -> AttentionCase:
    """A case whose pages are in random order in the pool.

    Pages that no row owns hold `unused`; the rest of a row's last page holds `tail` (None: the
    same).
    """
    noise = torch.Generator().manual_seed(seed)
    counts = [-(-context // page_size) for _, context in lens]
    order = (torch.randperm(sum(counts) + 3, generator=noise) + 1).to(torch.int32)
    pool = torch.full((len(order) + 1, 2, page_size, kv_heads, head_dim), unused)
    pool[0] = 1000.0  # the dummy page may hold any finite numbers
    table = torch.zeros(len(lens), max(counts) + 1, dtype=torch.int32)
    rows = []
    first = 0
    for row, ((_, context), count) in enumerate(zip(lens, counts, strict=True)):
        pages = order[first : first + count]
        first += count
        table[row, :count] = pages
        pool[pages.long()] = unused if tail is None else tail
        vectors = torch.randn(2, context, kv_heads, head_dim, generator=noise).to(dtype).float()
        places = torch.arange(context)
        pool[pages[places // page_size].long(), :, places % page_size] = vectors.transpose(0, 1)
        rows.append(vectors.to(device))
    q = torch.randn(sum(query for query, _ in lens), heads, head_dim, generator=noise).to(
        device, dtype
    )
    step = step_of(phase, lens, (table.to(device),))
    return AttentionCase(
        pool.to(device, dtype), step, q, tuple(kv[0] for kv in rows), tuple(kv[1] for kv in rows)
    )


def make_latent(case: AttentionCase, rope_dim: int) -> AttentionCase:
    """The case over latent vectors: its first KV head's keys; values lack their last part."""
    keys = tuple(row[:, :1] for row in case.keys)
    return evolve(
        case,
        pool=case.pool[:, 0, :, 0].contiguous(),
        keys=keys,
        values=tuple(row[..., : row.shape[-1] - rope_dim] for row in keys),
    )


def in_8_bits(case: AttentionCase, k_scale: float, v_scale: float) -> AttentionCase:
    """The case over 8-bit floats, with the keys and values that these represent with the scales."""
    narrow = torch.float8_e4m3fn
    keys, values = (
        tuple(each.to(narrow).float() * scale for each in side)
        for side, scale in ((case.keys, k_scale), (case.values, v_scale))
    )
    return evolve(case, pool=case.pool.to(narrow), keys=keys, values=values)


def add_sinks(layer: LayerInfo, heads: int, device: str | torch.device) -> LayerInfo:
    """The layer with a sink for each head, from far below the scores to above most of them."""
    return evolve(layer, sinks=torch.linspace(-4.0, 6.0, heads).flip(0).to(device))


def in_second_group(case: AttentionCase) -> AttentionCase:
    """The case with its page table as that of KV group 1; group 0 only has dummy pages."""
    (table,) = case.step.page_tables
    return evolve(case, step=evolve(case.step, page_tables=(torch.zeros_like(table), table)))


def move_pages(case: AttentionCase) -> AttentionCase:
    """The case with other pages in its page table, for the same rows, from the last one down."""
    (table,), count = case.step.page_tables, len(case.pool)
    moved = torch.where(table > 0, count - table, table)
    # Page 0 is the dummy page.
    pool = torch.cat([case.pool[:1], case.pool[1:].flip(0)])
    return evolve(case, pool=pool, step=evolve(case.step, page_tables=(moved,)))


def context_of(
    case: AttentionCase,
    options: Any,
    layers: int = 1,
    max_rows: int = MAX_ROWS,
    max_seq_len: int = MAX_SEQ_LEN,
) -> AttentionContext:
    """The context of a backend for the case; every layer has the case's pool."""
    layout, part = describe_pool(case)
    page_size = part.page_slots
    attention_query = query(
        layout=layout,
        heads=case.q.shape[1],
        q_dtype=str(case.q.dtype).removeprefix("torch."),
        kv_dtype=str(case.pool.dtype).removeprefix("torch."),
        page_size=page_size,
        max_rows=max_rows,
        max_seq_len=max_seq_len,
    )
    return AttentionContext(
        query=attention_query,
        device=case.pool.device,
        page_size=page_size,
        layers={
            index: LayerInfo(index=index, group=0, scale=1.0, out_dim=out_dim_of(case))
            for index in range(layers)
        },
        pools=dict.fromkeys(range(layers), case.pool),
        kv=dict.fromkeys(range(layers), part),
        options=options,
    )


def describe_pool(case: AttentionCase) -> tuple[Layout, KVLayer]:
    """The layout of the case's pool, and its parts."""
    if case.pool.dim() == 3:
        dim = case.pool.shape[-1]
        rope_dim = dim - case.values[0].shape[-1]
        return LatentKV(dim=dim, rope_dim=rope_dim), KVLayer(group=0, latent=case.pool)
    kv_heads, head_dim = case.pool.shape[3:]
    layout = FullKV(kv_heads=kv_heads, k_dim=head_dim, v_dim=head_dim)
    return layout, KVLayer(group=0, k=case.pool[:, 0], v=case.pool[:, 1])


def out_dim_of(case: AttentionCase) -> int | None:
    """The width of an output head of the case; None for the width of its queries."""
    return case.values[0].shape[-1] if case.pool.dim() == 3 else None


def around(phase: Phase, page_size: int) -> list[tuple[int, int]]:
    """Rows (query tokens, context tokens) whose contexts end at a page's end, one before it and one
    after it.
    """
    contexts = [max(1, page_size * pages + more) for pages in (1, 2, 5) for more in (-1, 0, 1)]
    contexts += [1, 2, 777]
    if phase is Phase.PREFILL:
        return [(context, context) for context in contexts]
    if phase is Phase.DECODE:
        return [(1, context) for context in contexts]
    lengths = (1, 5, page_size, 64)
    return [(min(lengths[place % 4], context), context) for place, context in enumerate(contexts)]
