"""The cases of a backend whose steps a CUDA graph replays. On a CPU the work is repeated
instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
from attrs import evolve

from headstock.spi import AttentionStep, GraphSupport, LayerInfo, Phase, Planning
from headstock_conformance.attention.cases import MAX_SEQ_LEN, AttentionCase, out_dim_of
from headstock_conformance.attention.comparison import compare
from headstock_conformance.attention.reference import expected
from headstock_conformance.attention.replays import replayed_prompts
from headstock_conformance.attention.state_checks import MakeCase, row_lens
from headstock_conformance.attention.subject import Subject
from headstock_conformance.device_reads import forbid_device_reads

BUCKET = 4
"""Rows of the captured step."""


def list_graph_cases(
    subject: Subject, make_case: MakeCase, layer: LayerInfo
) -> Iterator[tuple[str, Callable[[], object]]]:
    """The cases for the graph claims of the spec, for one layout."""
    graph, phases = subject.claims.graph, subject.claims.phases
    if not subject.claims.paged:
        return
    if graph >= GraphSupport.DECODE and Phase.DECODE in phases:
        yield "decode: replays", partial(check_decode, subject, make_case, layer)
    if graph >= GraphSupport.ALWAYS and Phase.EXTEND in phases:
        yield "extend: replays", partial(check_prompts, subject, make_case, layer)


def capture(subject: Subject, work: Callable[[], None]) -> Callable[[], object]:
    """The function that repeats the work: on CUDA the replay of its graph.

    raises: DeviceRead on a CPU, if a graph would repeat a value that the work reads
    """
    if subject.device != "cuda":
        # Stand-ins for kernels read values that a kernel has on the device.
        is_real = subject.device == subject.env.device

        def work_again() -> None:
            with forbid_device_reads() if is_real else nullcontext():
                work()

        work_again()
        return work_again
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def check_prompts(subject: Subject, make_case: MakeCase, layer: LayerInfo) -> None:
    """One captured plan serves padded steps with prompt tokens, for short contexts or long ones."""
    for longest in (MAX_SEQ_LEN // 2, MAX_SEQ_LEN):
        made = [
            make_case(Phase.EXTEND, subject.device, row_lens(Phase.EXTEND, *contexts))
            for contexts in ((longest - 100, 40, 3, 700), (5, 16), (64, 15, 1))
        ]
        backend = subject.open(made[0], [layer], graph=GraphSupport.ALWAYS)
        replayed_prompts(backend, layer, 24, made, partial(capture, subject), longest)
        backend.close()


def check_decode(subject: Subject, make_case: MakeCase, layer: LayerInfo) -> None:
    """One captured plan serves decode steps of other lengths, pages and numbers of rows."""
    made = [
        make_case(Phase.DECODE, subject.device, row_lens(Phase.DECODE, *contexts))
        for contexts in ((90, 40, 3, 17), (5, 16), (64, 15, 1))
    ]
    first = made[0]
    backend = subject.open(first, [layer], graph=GraphSupport.DECODE)
    backend.graph_init([BUCKET, 1], MAX_SEQ_LEN)
    size = first.pool.shape[1] if first.pool.dim() == 3 else first.pool.shape[2]
    static = make_static_step(first, -(-MAX_SEQ_LEN // size))
    plan = backend.graph_plan(BUCKET, static)
    layer = evolve(layer, out_dim=out_dim_of(first))
    q = first.q.new_zeros(BUCKET, *first.q.shape[1:])
    out = layer.empty_output(q).fill_(float("nan"))
    is_planned = subject.claims.planning is Planning.PER_STEP

    def work() -> None:
        # like the runner: without planning, the update is part of the graph
        if not is_planned:
            backend.graph_update(plan, static)
        backend.forward(q, layer, plan, out)

    if is_planned:
        backend.graph_update(plan, static)
    replay = capture(subject, work)
    for number, case in enumerate(made):
        rows = case.step.num_rows
        first.pool[: len(case.pool)].copy_(case.pool)
        q.zero_()[:rows].copy_(case.q)
        fill_static_step(static, case)
        if is_planned:
            backend.graph_update(plan, case.step)
        out.fill_(float("nan"))
        replay()
        text = f"replay {number + 1}, of {rows} rows"
        assert bool(out.isfinite().all()), f"{text}: rows that pad the batch are not finite"
        try:
            compare(out[:rows], expected(case, layer)[0])
        except AssertionError as error:
            raise AssertionError(f"{text}: {error}") from error
    backend.close()


def make_static_step(case: AttentionCase, columns: int) -> AttentionStep:
    """A decode step of padding rows, whose tensors are rewritten before each replay."""
    device = case.q.device
    return AttentionStep(
        phase=Phase.DECODE,
        query_start=torch.arange(BUCKET + 1, dtype=torch.int32, device=device),
        context_lens=torch.ones(BUCKET, dtype=torch.int32, device=device),
        page_tables=(torch.zeros(BUCKET, columns, dtype=torch.int32, device=device),),
        host_query_lens=np.ones(BUCKET, np.int32),
        # without planning: the maximum of a row
        host_context_lens=np.full(BUCKET, MAX_SEQ_LEN, np.int32),
    )


def fill_static_step(static: AttentionStep, case: AttentionCase) -> None:
    """Write the case's rows to the captured step; other rows are padding."""
    rows = case.step.num_rows
    (table,), (own,) = static.page_tables, case.step.page_tables
    static.context_lens.fill_(1)[:rows] = case.step.context_lens
    table.zero_()[:rows, : own.shape[1]] = own
