"""Faults on demand in a real engine, by the hooks around its parts.

    nan@STEP:ROW        the row's activations become NaN
    execute@STEP        launching the step raises
    wait@STEP           reading what the step sampled raises
    schedule@STEP       the scheduler raises
    slow@STEP:SECONDS   the device is slow
    allocate            there is no memory for the KV pool
    capture             the runner cannot capture

Steps have the numbers that logs and recordings give them. A fault happens once, in the first step
from its own on in which it can. A replayed graph does not call attention, so a step that is to
have NaN is not replayed.

An engine has them by `Engine(config, hooks=FaultInjector.parse(("nan@4:1",)))`, an LLM by
`LLM(..., start=start_with_faults("nan@4:1"))`, and a server by `served.serve(faults=("nan@4:1",))`.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import numpy as np
import torch
from attrs import define, frozen
from torch import Tensor

from headstock.execution.abstract_executor import Executor, Pending
from headstock.logs import log_event
from headstock.nn.eager_step import run_eager_step
from headstock.requests import EngineLoop, StartedEngine, start_engine
from headstock.scheduler import Plan
from headstock.spi import (
    AttendInto,
    Budget,
    CaptureProgress,
    Program,
    ReplayLimits,
    ReplaySizes,
    Runner,
    Sample,
    ScheduleDecision,
    ScheduleFunction,
    Step,
    View,
)
from headstock.startup.part_hooks import PartHooks

LOG = logging.getLogger("headstock.faults")

FORMS = r"(execute|wait|schedule)@\d+|nan@\d+:\d+|slow@\d+:\d+(\.\d+)?|allocate|capture"


class InjectedFault(RuntimeError):
    """A fault that a test asked for."""


@frozen
class Fault:
    """One fault; `value` is a row or seconds, `text` what it was parsed from."""

    kind: str
    step: int = 0
    value: float = 0.0
    text: str = ""

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Parse a text of the forms above.   raises: ValueError"""
        if not re.fullmatch(FORMS, text):
            raise ValueError(f"{text} is no fault")
        kind, _, rest = text.partition("@")
        step, _, value = rest.partition(":")
        return cls(kind, int(step or 0), float(value or 0), text)


@define
class FaultInjector(PartHooks):
    """The pending faults, and the wrappers that make an engine's parts fail.

    The parts know nothing of faults; a part that no pending fault concerns is not wrapped.

    step: the number of the step that runs now; -1 before the first, as builds run steps too
    """

    pending: list[Fault]
    step: int = -1

    @classmethod
    def parse(cls, texts: Iterable[str]) -> FaultInjector:
        """Parse the texts of some faults."""
        return cls([Fault.parse(text) for text in texts])

    def has_pending(self, *kinds: str) -> bool:
        """Whether a fault of one of these kinds is pending."""
        return any(fault.kind in kinds for fault in self.pending)

    def list_due(self, kind: str, step: int) -> Iterator[Fault]:
        """List the faults of `kind` that may happen in `step`; the caller removes those it uses."""
        yield from [fault for fault in self.pending if fault.kind == kind and fault.step <= step]

    def raise_if_due(self, kind: str, step: int = 0) -> None:
        """Raise InjectedFault when a fault of `kind` is due."""
        for fault in self.list_due(kind, step):
            self.pending.remove(fault)
            raise InjectedFault(f"{kind}@{fault.step} was injected")

    def wrap_allocation(self, allocate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `allocate`, which then finds no memory."""

        def allocate_failing(*arguments: Any, **keywords: Any) -> Any:
            raise MemoryError("allocate was injected")

        return allocate_failing if self.has_pending("allocate") else allocate

    def wrap_scheduler(self, schedule: ScheduleFunction) -> ScheduleFunction:
        """Wrap the scheduler's `schedule`, which then raises in its step."""

        def schedule_failing(view: View, budget: Budget) -> ScheduleDecision:
            self.raise_if_due("schedule", view.step)
            return schedule(view, budget)

        return schedule_failing if self.has_pending("schedule") else schedule

    def wrap_runner(self, runner: Runner, program: Program) -> Runner:
        """Wrap `runner` with the faults of forward passes and captures."""
        if not self.has_pending("nan", "execute", "capture"):
            return runner
        return FaultyRunner(runner, program, self)

    def wrap_executor(self, executor: Executor) -> Executor:
        """Wrap `executor` with the faults of steps.

        Any pending fault needs it, the runner's too: it sets the number of the step that runs.
        """
        return FaultyExecutor(executor, self) if self.pending else executor


def start_with_faults(*texts: str) -> Callable[..., tuple[StartedEngine, EngineLoop]]:
    """What starts an engine in this process with these faults, each of which happens once."""
    return partial(start_engine, hooks=FaultInjector.parse(texts))


class FaultyExecutor(Executor):
    """Runs plans with `inner`, late or not at all where a fault is due."""

    def __init__(self, inner: Executor, faults: FaultInjector) -> None:
        self.inner = inner
        self.faults = faults

    def execute(self, plan: Plan, new_rows: Mapping[int, Any]) -> Pending:
        """Launch `plan`."""
        # The inner parts see no plan. What runs before the first one, as a profile run, keeps -1,
        # so that no fault strikes a start.
        self.faults.step = plan.number
        for fault in self.faults.list_due("slow", plan.number):
            self.faults.pending.remove(fault)
            time.sleep(fault.value)
        return FaultyStep(self.inner.execute(plan, new_rows), self.faults, plan.number)

    def prepare_next(self) -> int:
        """Capture one graph; return how many sizes are still without."""
        return self.inner.prepare_next()

    def close(self) -> None:
        """Free the device, and warn of faults that never happened: they tested nothing."""
        self.inner.close()
        if self.faults.pending:
            LOG.warning(
                log_event(
                    "faults never happened",
                    faults=" ".join(fault.text for fault in self.faults.pending),
                )
            )
            self.faults.pending.clear()


@frozen(eq=False)
class FaultyStep(Pending):
    """A step whose result a fault may lose."""

    inner: Pending
    faults: FaultInjector
    number: int

    @property
    def is_replayed(self) -> bool:  # type: ignore[override]
        """Whether the step replays a graph."""
        return self.inner.is_replayed

    @property
    def reasons(self) -> Mapping[int, str]:  # type: ignore[override]
        """What is wrong with unhealthy rows."""
        return self.inner.reasons

    @property
    def has_drafts(self) -> bool:  # type: ignore[override]
        """Whether drafts are made behind the step."""
        return self.inner.has_drafts

    def wait_drafts(self) -> Tensor:
        """Wait for them."""
        return self.inner.wait_drafts()

    def wait(self) -> Sample:
        """Wait for the step's sample."""
        # After the wait: the step has run, so that the fault loses its result and nothing else.
        sample = self.inner.wait()
        self.faults.raise_if_due("wait", self.number)
        return sample


class FaultyRunner(Runner):
    """Runs steps with `inner`; those in which NaN is due operation by operation."""

    def __init__(self, inner: Runner, program: Program, faults: FaultInjector) -> None:
        self.inner = inner
        self.program = program
        self.faults = faults

    def run(self, step: Step) -> Sample:
        """Run the step.   writes: the pools, the token table"""
        faults = self.faults
        faults.raise_if_due("execute", faults.step)
        due = [each for each in faults.list_due("nan", faults.step) if each.value in step.row_ids]
        if not due:
            # Without the row the fault waits for a step that has it.
            return self.inner.run(step)
        for fault in due:
            faults.pending.remove(fault)
        return run_eager_step(self.program, spoil_rows(step, [int(each.value) for each in due]))

    def prepare(self, limits: ReplayLimits, report: CaptureProgress) -> ReplaySizes:
        """Prepare the replays of `inner`."""
        sizes = self.inner.prepare(limits, report)
        if sizes.rows and self.faults.has_pending("capture"):
            self.inner.prepare(ReplayLimits(), report)
            self.faults.raise_if_due("capture")
        return sizes

    def prepare_next(self) -> int:
        """Make one replay; return how many sizes are left."""
        return self.inner.prepare_next()

    def close(self) -> None:
        """Free what was prepared."""
        self.inner.close()


def spoil_rows(step: Step, rows: Sequence[int]) -> Step:
    """Return the step, changed to have NaN for attention in these rows."""
    tokens = np.isin(step.row_ids, rows).repeat(step.stops - step.starts).nonzero()[0]

    def attention() -> AttendInto:
        attend = step.attention()

        def attend_with_nan(q: Tensor, layer: int, out: Tensor) -> None:
            attend(q, layer, out)
            out[torch.from_numpy(tokens).to(out.device)] = torch.nan

        return attend_with_nan

    spoiled = copy(step)
    # As frozen records allow no other way to give one of them another method.
    vars(spoiled).update(attention=attention, grouped=lambda: spoiled)
    return spoiled
