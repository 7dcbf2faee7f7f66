"""Steps whose decode rows share leading pages, split in two like core does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from headstock.execution.prefix_step import HostPrefixes, bound_prefixes, split_step
from headstock.spi import AttentionBackend, AttentionStep, LayerInfo, Phase
from headstock_conformance.attention import cases
from headstock_conformance.attention.cases import AttentionCase
from headstock_conformance.attention.comparison import compare
from headstock_conformance.attention.reference import expected

GROUPS = 4
"""Groups of a captured step, including those without rows."""

LAYOUTS: tuple[tuple[list[tuple[int, int]], list[int], list[int]], ...] = (
    ([(3, 2)], [], [5, 1, 17]),
    ([(2, 1), (3, 4), (2, 3)], [9, 30], [1, 2, 40, 16, 15, 17, 33]),
    ([(5, 3)], [1, 64, 3], [16, 1, 8, 31, 5]),
)
"""Groups of (rows, pages that they share); the lengths of rows without a group; the tokens after
the shared pages in each row of a group.
"""


MIXED_LAYOUTS: tuple[tuple[Any, list[tuple[int, int]]], ...] = (
    (LAYOUTS[1], [(20, 20), (3, 90)]),
    (LAYOUTS[0], [(9, 40), (1, 1)]),
    (([], [40, 3], []), [(12, 300)]),
    (([], [], []), [(31, 31), (1, 7)]),
    (LAYOUTS[2], [(2, 2), (17, 70), (5, 16)]),
)
"""The same, and rows (query tokens, context tokens) with prompts after them."""
MIXED_ROWS, MIXED_TOKENS = 14, 40
"""Rows and tokens of the step that a graph is captured for."""


def make(
    groups: Sequence[tuple[int, int]],
    alone: Sequence[int],
    own: Sequence[int],
    *,
    prompts: Sequence[tuple[int, int]] = (),
    page_size: int = 16,
    **more: Any,
) -> AttentionCase:
    """A step of decode rows, group by group, then without a group; unowned pages hold NaN.

    prompts: rows (query tokens, context tokens) after these
    """
    counts = [rows for rows, _ in groups]
    pages = [pages for rows, pages in groups for _ in range(rows)]
    lens = [page_size * n + some for n, some in zip(pages, own, strict=True)] + list(alone)
    phase, shapes = Phase.EXTEND if prompts else Phase.DECODE, [(1, n) for n in lens]
    case = cases.make(phase, [*shapes, *prompts], page_size=page_size, **more)
    (table,) = case.step.page_tables
    keys, values = list(case.keys), list(case.values)
    ends = np.cumsum([0, *counts]).tolist()
    for first, last, (_, shared) in zip(ends, ends[1:], groups, strict=False):
        tokens = shared * page_size
        for row in range(first + 1, last):
            # No row owns the row's old pages there now.
            case.pool[table[row, :shared].long()] = math.nan
            table[row, :shared] = table[first, :shared]
            for side in (keys, values):
                side[row] = torch.cat([side[first][:tokens], side[row][tokens:]])
    num_alone = len(alone) + len(prompts)
    shared_lens = np.array([page_size * n for n in pages] + [0] * num_alone, np.int32)
    host = HostPrefixes(
        query_lens=np.array(counts, np.int32),
        context_lens=np.array([page_size * n for _, n in groups], np.int32),
        rest_lens=case.step.host_context_lens - shared_lens,
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
    """The case with its page tables as those of KV group 1; group 0 only has dummy pages."""

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

    made: the backend was built over the first, which has the most pages
    record: what does the work again; on a GPU, the replay of a graph
    """
    return _check_replays(backend, layer, made, _allocate(made, Phase.DECODE, rows, rows), record)


def check_mixed_replays(
    backend: AttentionBackend,
    layer: LayerInfo,
    made: Sequence[AttentionCase],
    *,
    rows: int = MIXED_ROWS,
    tokens: int = MIXED_TOKENS,
    record: Callable[[Callable[[], None]], Callable[[], object]] = lambda work: work,
) -> float:
    """The same for a plan of prompts, of at most `tokens` tokens, after decode rows.

    Rows that pad such a step have no token, and nothing is written for tokens that pad it.

    made, record: as in `check_replays`
    """
    return _check_replays(backend, layer, made, _allocate(made, Phase.EXTEND, rows, tokens), record)


@frozen(eq=False)
class _StaticStep:
    """A step of padding at fixed addresses, and the groups of its rows.

    q: [tokens, heads, head_dim]
    """

    step: AttentionStep
    group_starts: Tensor
    shared_lens: Tensor
    q: Tensor


def _allocate(made: Sequence[AttentionCase], phase: Phase, rows: int, tokens: int) -> _StaticStep:
    """A step of padding with room for each of these cases."""
    lens = torch.ones(rows, dtype=torch.int32, device=made[0].q.device)
    query_start = torch.arange(rows + 1, dtype=torch.int32, device=lens.device)
    is_decode = phase is Phase.DECODE
    if not is_decode:
        query_start.clamp_(max=1)
    step = AttentionStep(
        phase=phase,
        query_start=query_start,
        context_lens=lens,
        page_tables=(lens.new_zeros((rows, max(_table(case).shape[1] for case in made))),),
        host_query_lens=np.full(rows, 1 if is_decode else tokens, np.int32),
        host_context_lens=np.full(rows, cases.MAX_SEQ_LEN, np.int32),
    )
    q = made[0].q.new_zeros(tokens, *made[0].q.shape[1:])
    return _StaticStep(step, lens.new_zeros(GROUPS + 1), torch.zeros_like(lens), q)


def _fill(static: _StaticStep, case: AttentionCase) -> None:
    """Write a case to the step.   writes: its tensors"""
    step, count, shared = static.step, case.step.num_rows, case.step.shared
    assert shared is not None
    static.q[: len(case.q)].copy_(case.q)
    if step.phase is not Phase.DECODE:
        step.query_start.fill_(len(case.q))[: count + 1] = case.step.query_start
    step.context_lens.fill_(1)[:count] = case.step.context_lens
    step.page_tables[0].zero_()[:count, : _table(case).shape[1]] = _table(case)
    starts = shared.prefixes.query_start
    static.group_starts.fill_(int(starts[-1]))[: len(starts)] = starts
    static.shared_lens.zero_()[:count] = shared.shared_lens


def _check_replays(
    backend: AttentionBackend,
    layer: LayerInfo,
    made: Sequence[AttentionCase],
    static: _StaticStep,
    record: Callable[[Callable[[], None]], Callable[[], object]],
) -> float:
    """The largest error of a plan of this step that serves these cases in turn."""
    first, errors, step = made[0], [], static.step
    rows, page_size = step.num_rows, first.pool.shape[2]
    backend.graph_init([rows], cases.MAX_SEQ_LEN)
    out = torch.zeros_like(static.q)

    def attend() -> None:
        bounds = bound_prefixes(rows, GROUPS, cases.MAX_SEQ_LEN)
        split = split_step(step, static.group_starts, static.shared_lens, bounds, page_size)
        backend.forward(static.q, layer, backend.capture_plan(split), out)

    replay = record(attend)
    for case in made:
        count = len(case.q)
        first.pool[: len(case.pool)].copy_(case.pool)
        _fill(static, case)
        out.fill_(7 if step.phase is Phase.EXTEND else math.nan)
        replay()
        if step.phase is Phase.EXTEND:
            assert (out[count:] == 7).all(), "what pads the step was written"
        assert out.isfinite().all(), "padding rows are not finite"
        errors.append(compare(out[:count], expected(case, layer)[0]))
    return max(errors)


def _table(case: AttentionCase) -> Tensor:
    """The page table of a case's rows."""
    return case.step.page_tables[0]
