"""The cases of state between calls: plans, layers, engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from attrs import evolve
from torch import Tensor

from headstock.spi import Feature, LayerInfo, Phase
from headstock_conformance.attention.cases import AttentionCase, add_sinks, move_pages, step_of
from headstock_conformance.attention.comparison import check, compare
from headstock_conformance.attention.reference import expected
from headstock_conformance.attention.subject import Subject

MakeCase = Callable[[Phase, str, list[tuple[int, int]] | None], AttentionCase]


def list_state_cases(
    subject: Subject, make_case: MakeCase, layer: LayerInfo, *, contiguous: bool
) -> Iterator[tuple[str, Callable[[], object]]]:
    """The cases of state, for one layout."""
    phases = sorted(subject.claims.phases, key=lambda phase: phase.value)

    def bind(work: Callable[..., object], phase: Phase) -> Callable[[], object]:
        return partial(work, subject, make_case, layer, phase, contiguous)

    for phase in phases:
        yield f"{phase.value}: two plans are alive", bind(check_two_plans, phase)
        yield f"{phase.value}: queries are a view", bind(check_view, phase)
        yield f"{phase.value}: layers that differ", bind(check_unlike_layers, phase)
    yield f"{phases[0].value}: a plan serves several layers", bind(check_layers, phases[0])
    yield f"{phases[0].value}: two engines in a process", bind(check_engines, phases[0])
    if Feature.SLIDING_WINDOW in subject.claims.features and subject.claims.paged:
        for phase in phases:
            if phase is not Phase.PREFILL:
                text = f"{phase.value}: pages behind the window are gone"
                yield text, partial(check_gone_pages, subject, make_case, layer, phase)


def row_lens(phase: Phase, *contexts: int) -> list[tuple[int, int]]:
    """Rows of these contexts, with as many queries as the phase has."""
    queries = {Phase.PREFILL: 10**6, Phase.DECODE: 1}.get(phase, 5)
    return [(min(queries, context), context) for context in contexts]


def take_rows(case: AttentionCase, rows: slice) -> AttentionCase:
    """A step of some of the case's rows, over the same pool."""
    lens = list(
        zip(case.step.host_query_lens.tolist(), case.step.host_context_lens.tolist(), strict=True)
    )
    start = np.concatenate([[0], np.cumsum(case.step.host_query_lens)])
    first, last = start[rows.start], start[rows.stop]
    tables = tuple(table[rows].clone() for table in case.step.page_tables)
    return evolve(
        case,
        step=step_of(case.step.phase, lens[rows], tables),
        q=case.q[first:last],
        keys=case.keys[rows],
        values=case.values[rows],
    )


def attend_with(backend: object, case: AttentionCase, layer: LayerInfo, plan: object) -> Tensor:
    """The output of a case by an earlier plan."""
    out = evolve(layer, out_dim=None if case.pool.dim() == 5 else case.values[0].shape[-1])
    written = out.empty_output(case.q).fill_(float("nan"))
    backend.forward(case.q, layer, plan, written)  # type: ignore[attr-defined]
    return written


def check_two_plans(
    subject: Subject, make_case: MakeCase, layer: LayerInfo, phase: Phase, contiguous: bool
) -> None:
    """The plan of the next step is made before this one is computed."""
    case = make_case(phase, subject.device, row_lens(phase, 40, 3, 17, 90))
    backend = subject.open(case, [layer], contiguous=contiguous)
    steps = take_rows(case, slice(0, 2)), take_rows(case, slice(2, 4))
    for step in steps:
        check(backend, step, layer)
    plans = [backend.plan(step.step) for step in steps]
    for number, (step, plan) in enumerate(zip(steps, plans, strict=True)):
        out = attend_with(backend, step, layer, plan)
        try:
            compare(out, expected(step, layer)[0])
        except (AssertionError, RuntimeError, IndexError) as error:
            which = "the plan of a step changes when the next step is planned"
            text = which if number == 0 else "the plan of a step changes when the last one is used"
            raise AssertionError(f"{text}: {error}") from error
    backend.close()


def check_view(
    subject: Subject, make_case: MakeCase, layer: LayerInfo, phase: Phase, contiguous: bool
) -> None:
    """Queries are a strided view next to keys and values."""
    case = make_case(phase, subject.device, row_lens(phase, 40, 3))
    backend = subject.open(case, [layer], contiguous=contiguous)
    wide = torch.cat([case.q, torch.full_like(case.q, 9.0)], 1)
    with torch.inference_mode():
        check(backend, evolve(case, q=wide[:, : case.q.shape[1]]), layer)
    backend.close()


def check_layers(
    subject: Subject, make_case: MakeCase, layer: LayerInfo, phase: Phase, contiguous: bool
) -> None:
    """One plan serves layers of different scales in turn."""
    case = make_case(phase, subject.device, row_lens(phase, 40, 3))
    layers = [
        evolve(layer, index=index, scale=scale) for index, scale in enumerate((0.3, 0.1, 0.5))
    ]
    backend = subject.open(case, layers, contiguous=contiguous)
    plan = backend.plan(case.step)
    for each in layers:
        try:
            compare(attend_with(backend, case, each, plan), expected(case, each)[0])
        except AssertionError as error:
            raise AssertionError(
                f"a layer by a plan that an earlier layer used is wrong: {error}"
            ) from error
    backend.close()


def check_unlike_layers(
    subject: Subject, make_case: MakeCase, layer: LayerInfo, phase: Phase, contiguous: bool
) -> None:
    """Layers of two KV groups differ in their scales, windows and softcaps, as far as claimed."""
    case = make_case(phase, subject.device, row_lens(phase, 40, 3, 90))
    moved = move_pages(case)
    tables = (*case.step.page_tables, *moved.step.page_tables)
    cases = [evolve(each, step=evolve(each.step, page_tables=tables)) for each in (case, moved)]
    features = subject.claims.features
    layers = [
        evolve(
            layer,
            index=number,
            group=number % 2,
            scale=layer.scale * (1 + number // 4),
            window=9 if number % 2 and Feature.SLIDING_WINDOW in features else None,
            softcap=0.7 if number // 2 % 2 and Feature.SOFTCAP in features else 0.0,
        )
        for number in range(8)
    ]
    if Feature.SINKS in features:
        heads = case.q.shape[1]
        layers[1::3] = [add_sinks(each, heads, case.q.device) for each in layers[1::3]]
    pools = {each.index: cases[each.group].pool for each in layers}
    backend = subject.open(case, layers, contiguous=contiguous, groups=2, layer_pools=pools)
    for order in (layers, layers[::-1]):
        plan = backend.plan(cases[0].step)
        for each in order:
            own = cases[each.group]
            try:
                compare(attend_with(backend, own, each, plan), expected(own, each)[0])
            except AssertionError as error:
                raise AssertionError(
                    f"layer {each.index + 1} of {len(layers)} that differ (group {each.group}, "
                    f"scale {each.scale:g}, window {each.window}, softcap {each.softcap}): {error}"
                ) from error
    backend.close()


def check_engines(
    subject: Subject, make_case: MakeCase, layer: LayerInfo, phase: Phase, contiguous: bool
) -> None:
    """Two backends with different pools run alternately."""
    cases = [
        make_case(phase, subject.device, row_lens(phase, *contexts))
        for contexts in ((40, 3), (5, 90, 17))
    ]
    backends = [subject.open(case, [layer], contiguous=contiguous) for case in cases]
    plans = [each.plan(case.step) for each, case in zip(backends, cases, strict=True)]
    for _ in range(2):
        for backend, case, plan in zip(backends, cases, plans, strict=True):
            try:
                compare(attend_with(backend, case, layer, plan), expected(case, layer)[0])
            except (AssertionError, RuntimeError, IndexError) as error:
                text = "two backends of a process disturb each other"
                raise AssertionError(f"{text}: {error}") from error
    for backend in backends:
        backend.close()


def check_gone_pages(subject: Subject, make_case: MakeCase, layer: LayerInfo, phase: Phase) -> None:
    """Pages behind the window belong to other rows by now, and the page table has 0 instead."""
    contexts = (60, 33, 16)
    case = make_case(phase, subject.device, [(1, context) for context in contexts])
    windowed = evolve(layer, window=9)
    features = frozenset({Feature.SLIDING_WINDOW})
    size = case.pool.shape[1] if case.pool.dim() == 3 else case.pool.shape[2]
    (table,) = case.step.page_tables
    for row, context in enumerate(contexts):
        behind = (context - 9) // size
        case.pool[table[row, :behind].long()] = float("nan")
        table[row, :behind] = 0
    backend = subject.open(case, [windowed], features=features)
    check(backend, case, windowed)
    backend.close()
