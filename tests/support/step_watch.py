"""Counts what the steps of an engine did, so that a test of equal tokens fails where nothing was
done.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from headstock.engine.engine import Engine
from headstock.execution.prefix_tracker import GroupedRows
from headstock.scheduler import Plan, State
from headstock.scheduler.events import Paced
from headstock.spi import Step


def watch_steps(engine: Engine) -> Counter[str]:
    """Counts of what happens from now on.

    groups: steps whose rows read shared pages once; of these several: with more than one group,
        moved: with rows in another order, mixed: beside prompts, alone: beside rows in no group,
        whole: beside prompts, by a graph of `cudagraph` that has their groups
    between: steps with prompts and rows that decode, none of them grouped, after such steps
    paced: times that the bound on prompt tokens changed
    """
    counts = Counter[str]()
    _watch_groups(engine, counts)
    make_events = engine.pacer.make_events

    def counted(state: State, **known: Any) -> list[Paced]:
        events: list[Paced] = make_events(state, **known)
        counts["paced"] += len(events)
        return events

    engine.pacer.make_events = counted  # type: ignore[method-assign]
    return counts


def _watch_groups(engine: Engine, counts: Counter[str]) -> None:
    executor: Any = engine.executor
    while not hasattr(executor, "steps"):
        executor = executor.inner
    tracker, buffers = executor.steps.tracker, executor.steps.buffers
    if tracker is None:
        return  # this engine shares no prefixes
    group_plan = tracker.group_plan

    def counted(plan: Plan) -> GroupedRows | None:
        # Groups are right because the host's tables are those that the step reads. On a GPU the
        # device's are written later, in the order of its work.
        for group, table in tracker.tables.items():
            there = buffers.page_tables[group]
            assert there.is_cuda or np.array_equal(table, there.numpy())
        grouped: GroupedRows | None = group_plan(plan)
        if grouped is not None:
            counts["groups"] += 1
            counts["several"] += len(grouped.groups.counts) > 1
            counts["moved"] += not grouped.is_sorted
            counts["mixed"] += plan.num_decode < len(plan.rows)
            counts["alone"] += int(grouped.groups.counts.sum()) < plan.num_decode
        return grouped

    tracker.group_plan = counted
    execute = executor.execute

    def executed(plan: Plan, *arguments: Any) -> Any:
        before = counts["groups"]
        pending = execute(plan, *arguments)
        is_between = counts["groups"] == before and 1 < plan.num_decode < len(plan.rows)
        counts["between"] += bool(before) and is_between
        return pending

    executor.execute = executed
    runner = getattr(executor.runner, "inner", executor.runner)
    prompts = getattr(runner, "prompts", None)
    if prompts is None:
        return
    whole_for = prompts.whole_for

    def chosen(bucket: Any, step: Step) -> Any:
        whole = whole_for(bucket, step)
        counts["whole"] += whole is not None and whole.prefixes is not None
        return whole

    prompts.whole_for = chosen
