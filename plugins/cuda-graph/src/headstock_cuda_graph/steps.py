"""What a decode step computes, from the seats of its rows and their positions alone."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headstock.spi import AttentionStep, Batch, Phase, Sampling, Seats

SETTINGS = (frozenset[str](), frozenset({"temperature"}), frozenset({"temperature", "top_k", "top_p", "min_p"}))
"""Kinds of sampling that are recorded, each by the columns it looks at."""


def kind_of(settings: frozenset[str]) -> frozenset[str]:
    """The least kind of `SETTINGS` that has these columns."""
    return next(kind for kind in SETTINGS if settings <= kind)


def batch(seats: Seats, rows: Tensor, positions: Tensor) -> Batch:
    """One token for each row.   rows, positions: [n] int64"""
    size = seats.page_size
    columns, offsets = positions.div(size, rounding_mode="floor"), positions % size
    return Batch(
        tokens=seats.tokens[rows, positions],
        positions=positions,
        slots=tuple(torch.add(offsets, table[rows, columns], alpha=size) for table in seats.page_tables),
        pools=seats.pools,
        rows=rows,
        logit_indices=None,
        sampling=Sampling(),
    )


def attention_step(
    seats: Seats, rows: Tensor, positions: Tensor, query_start: Tensor, host_context_lens: np.ndarray, columns: int
) -> AttentionStep:
    """What the decode backend is told, with page tables of `columns` columns.

    rows, positions: [n] int64    query_start: [n + 1] int32, 0, 1, 2, ...
    host_context_lens: [n] int32, or the most that they may be
    """
    return AttentionStep(
        phase=Phase.DECODE,
        query_start=query_start,
        context_lens=torch.add(positions, 1, out=torch.empty_like(positions, dtype=torch.int32)),
        page_tables=tuple(table[:, :columns].index_select(0, rows) for table in seats.page_tables),
        host_query_lens=np.ones_like(host_context_lens),
        host_context_lens=host_context_lens,
    )


def sampling(seats: Seats, rows: Tensor, positions: Tensor, kind: frozenset[str]) -> Sampling:
    """How the tokens that come to these positions are sampled.   rows, positions: [n] int64"""
    if not kind:
        return Sampling()
    columns = {name: getattr(seats, name)[rows] for name in sorted(kind)}
    return Sampling(**columns, seeds=seats.seeds[rows], positions=positions)
