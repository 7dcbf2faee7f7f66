"""Plans that a graph captures once for many steps, compared with the answer of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from attrs import evolve
from torch import Tensor

from headstock.spi import AttentionBackend, AttentionStep, LayerInfo, Phase
from headstock_conformance.attention.cases import MAX_SEQ_LEN, AttentionCase, out_dim_of
from headstock_conformance.attention.comparison import compare
from headstock_conformance.attention.reference import expected


def check_replays(
    backend: AttentionBackend,
    cases: Sequence[AttentionCase],
    layer: LayerInfo,
    *,
    bucket: int,
    record: Callable[[Callable[[], None]], Callable[[], object]] = lambda work: work,
    held: Callable[[Any], Sequence[Tensor]] = lambda plan: (),
) -> float:
    """The largest error of a bucket's plan over these decode cases, some with fewer rows than the
    bucket.

    made: the backend was built over the first, which has the most pages: its pool takes the others'
        numbers
    record: what does the work again; on a GPU, the replay of a graph
    held: the tensors of the plan, whose addresses must stay
    """
    first, errors = cases[0], []
    backend.graph_init([bucket, 1], MAX_SEQ_LEN)
    plan = backend.graph_plan(bucket, first.step)
    places = [tensor.data_ptr() for tensor in held(plan)]
    q = first.q.new_zeros(bucket, *first.q.shape[1:])
    layer = evolve(layer, out_dim=out_dim_of(first))
    out = layer.empty_output(q).fill_(math.nan)
    replay = record(lambda: backend.forward(q, layer, plan, out))
    for case in cases:
        rows = case.step.num_rows
        first.pool[: len(case.pool)].copy_(case.pool)
        q[:rows].copy_(case.q)
        backend.graph_update(plan, case.step)
        assert [tensor.data_ptr() for tensor in held(plan)] == places
        out.fill_(math.nan)
        replay()
        assert out.isfinite().all(), "padding rows are not finite"
        errors.append(compare(out[:rows], expected(case, layer)[0]))
    return max(errors)


def replayed_prompts(
    backend: AttentionBackend,
    layer: LayerInfo,
    tokens: int,
    cases: Sequence[AttentionCase],
    record: Callable[[Callable[[], None]], Callable[[], object]] = lambda work: work,
    longest: int = MAX_SEQ_LEN,
) -> float:
    """The largest error of a plan that a graph captures, which serves these cases of prompts in
    turn: each has at most `tokens` query tokens, and three rows pad it.

    record: as in `check_replays`
    longest: the maximum tokens of a context of the plan
    """
    first = cases[0]
    rows = max(case.step.num_rows for case in cases) + 3
    page_size = first.pool.shape[1] if first.pool.dim() == 3 else first.pool.shape[2]
    columns = -(-longest // page_size)
    query_start = first.step.query_start.new_zeros(rows + 1)
    lens, table = query_start.new_ones(rows), query_start.new_zeros((rows, columns))
    step = AttentionStep(
        phase=Phase.EXTEND,
        query_start=query_start,
        context_lens=lens,
        page_tables=(table,),
        host_query_lens=np.full(rows, tokens, np.int32),
        host_context_lens=np.full(rows, longest, np.int32),
    )
    q = first.q.new_zeros(tokens, *first.q.shape[1:])
    layer = evolve(layer, out_dim=out_dim_of(first))
    out, errors = layer.empty_output(q).zero_(), []
    query_start[1:] = 1
    replay = record(lambda: backend.forward(q, layer, backend.capture_plan(step), out))
    for case in cases:
        count = case.step.num_rows
        first.pool[: len(case.pool)].copy_(case.pool)
        q[: len(case.q)].copy_(case.q)
        query_start.fill_(len(case.q))[: count + 1] = case.step.query_start
        lens.fill_(1)[:count] = case.step.context_lens
        pages = case.step.page_tables[0][:, :columns]
        table.zero_()[:count, : pages.shape[1]] = pages
        out.fill_(7)
        replay()
        assert (out[len(case.q) :] == 7).all(), "what pads the step was written"
        errors.append(compare(out[: len(case.q)], expected(case, layer)[0]))
    return max(errors)
