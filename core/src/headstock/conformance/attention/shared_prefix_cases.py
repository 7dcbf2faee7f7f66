"""Decode steps whose rows share leading pages, cut in two as core does it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from attrs import evolve
from torch import Tensor

from headstock.conformance.attention import cases
from headstock.conformance.attention.cases import AttentionCase
from headstock.conformance.attention.comparison import compare
from headstock.conformance.attention.reference import expected
from headstock.execution.prefix_step import HostPrefixes, bound_prefixes, split_step
from headstock.spi import AttentionBackend, AttentionStep, LayerInfo, Phase

GROUPS = 4
"""Groups of a captured step, those without rows included."""

LAYOUTS: tuple[tuple[list[tuple[int, int]], list[int], list[int]], ...] = (
    ([(3, 2)], [], [5, 1, 17]),
    ([(2, 1), (3, 4), (2, 3)], [9, 30], [1, 2, 40, 16, 15, 17, 33]),
    ([(5, 3)], [1, 64, 3], [16, 1, 8, 31, 5]),
)
"""Groups of (rows, pages that they share); the lengths of rows of no group; what follows the shared
pages in each row of a group, in tokens.
"""


def make(
    groups: Sequence[tuple[int, int]],
    alone: Sequence[int],
    own: Sequence[int],
    *,
    page_size: int = 16,
    **more: Any,
) -> AttentionCase:
    """A decode step of these rows, group by group; pages of no row hold NaN."""
    counts = [rows for rows, _ in groups]
    pages = [pages for rows, pages in groups for _ in range(rows)]
    lens = [page_size * n + some for n, some in zip(pages, own, strict=True)] + list(alone)
    case = cases.make(Phase.DECODE, [(1, n) for n in lens], page_size=page_size, **more)
    (table,) = case.step.page_tables
    keys, values = list(case.keys), list(case.values)
    ends = np.cumsum([0, *counts]).tolist()
    for first, last, (_, shared) in zip(ends, ends[1:], groups, strict=False):
        tokens = shared * page_size
        for row in range(first + 1, last):
            # What the row had there is nobody's now.
            case.pool[table[row, :shared].long()] = math.nan
            table[row, :shared] = table[first, :shared]
            for side in (keys, values):
                side[row] = torch.cat([side[first][:tokens], side[row][tokens:]])
    shared_lens = np.array([page_size * n for n in pages] + [0] * len(alone), np.int32)
    host = HostPrefixes(
        query_lens=np.array(counts, np.int32),
        context_lens=np.array([page_size * n for _, n in groups], np.int32),
        rest_lens=np.array(lens, np.int32) - shared_lens,
    )
    device = table.device
    step = split_step(
        case.step,
        torch.tensor(ends, dtype=torch.int32, device=device),
        torch.from_numpy(shared_lens).to(device),
        host,
        page_size,
    )
    return evolve(case, step=step, keys=tuple(keys), values=tuple(values))


def in_second_group(case: AttentionCase) -> AttentionCase:
    """The case with its page tables as those of KV group 1; group 0 has dummy pages alone."""

    def behind(step: AttentionStep) -> AttentionStep:
        return evolve(step, page_tables=(torch.zeros_like(step.page_tables[0]), *step.page_tables))

    shared = case.step.shared
    assert shared is not None
    parts = evolve(shared, prefixes=behind(shared.prefixes), rest=behind(shared.rest))
    return evolve(case, step=evolve(behind(case.step), shared=parts))


def check_replays(
    backend: AttentionBackend,
    layer: LayerInfo,
    made: Sequence[AttentionCase],
    *,
    rows: int,
    record: Callable[[Callable[[], None]], Callable[[], object]] = lambda work: work,
) -> float:
    """The largest error of a captured plan of `rows` rows that serves these cases in turn.

    made: the first is what the backend was built over, and has the most pages
    record: what does the work again; on a GPU, the replay of a graph
    """
    first, errors = made[0], []
    backend.graph_init([rows], cases.MAX_SEQ_LEN)
    page_size, columns = first.pool.shape[2], max(_table(case).shape[1] for case in made)
    lens = torch.ones(rows, dtype=torch.int32, device=first.q.device)
    table, shared_lens = lens.new_zeros((rows, columns)), torch.zeros_like(lens)
    group_starts = lens.new_zeros(GROUPS + 1)
    step = AttentionStep(
        phase=Phase.DECODE,
        query_start=torch.arange(rows + 1, dtype=torch.int32, device=lens.device),
        context_lens=lens,
        page_tables=(table,),
        host_query_lens=np.ones(rows, np.int32),
        host_context_lens=np.full(rows, cases.MAX_SEQ_LEN, np.int32),
    )
    q = first.q.new_zeros(rows, *first.q.shape[1:])
    out = torch.full_like(q, math.nan)

    def attend() -> None:
        bounds = bound_prefixes(rows, GROUPS, cases.MAX_SEQ_LEN)
        split = split_step(step, group_starts, shared_lens, bounds, page_size)
        backend.forward(q, layer, backend.capture_plan(split), out)

    replay = record(attend)
    for case in made:
        count, shared = case.step.num_rows, case.step.shared
        assert shared is not None
        first.pool[: len(case.pool)].copy_(case.pool)
        q[:count].copy_(case.q)
        lens.fill_(1)[:count] = case.step.context_lens
        table.zero_()[:count, : _table(case).shape[1]] = _table(case)
        starts = shared.prefixes.query_start
        group_starts.fill_(int(starts[-1]))[: len(starts)] = starts
        shared_lens.zero_()[:count] = shared.shared_lens
        out.fill_(math.nan)
        replay()
        assert out.isfinite().all(), "padding rows are not finite"
        errors.append(compare(out[:count], expected(case, layer)[0]))
    return max(errors)


def _table(case: AttentionCase) -> Tensor:
    """The page table of a case's rows."""
    return case.step.page_tables[0]
