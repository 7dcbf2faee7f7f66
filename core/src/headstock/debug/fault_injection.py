"""Faults on demand: what may go wrong in an engine, made to go wrong in a test (`--faults`,
`HEADSTOCK_FAULTS`).

    nan@STEP:ROW        the row's activations become NaN
    execute@STEP        launching the step raises
    wait@STEP           reading what the step sampled raises
    schedule@STEP       the scheduler raises
    slow@STEP:SECONDS   the device is slow
    allocate            there is no memory for the KV pool
    capture             the runner cannot capture

Steps have the numbers that logs and recordings give them. A fault happens once: in the first step,
from its own on, in which it can. (A replayed graph does not call attention, so a step that is to
have NaN is not replayed.)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import define, frozen
from torch import Tensor

from headstock.logs import log_event
from headstock.scheduler import Plan
from headstock.spi import (
    Attend,
    Batch,
    Budget,
    CaptureProgress,
    Choice,
    Choose,
    DecodeStep,
    Executor,
    Pending,
    PromptStep,
    Runner,
    Sample,
    View,
)

LOG = logging.getLogger(__name__)


class Injected(RuntimeError):
    """A fault that was asked for."""


@frozen
class Fault:
    """One fault; `value` is a row or seconds, `text` what was asked for."""

    kind: str
    step: int = 0
    value: float = 0.0
    text: str = ""

    @classmethod
    def parse(cls, text: str) -> Fault:
        """The fault that a text of the forms above stands for."""
        kind, _, rest = text.partition("@")
        step, _, value = rest.partition(":")
        return cls(kind, int(step or 0), float(value or 0), text)


@define
class Faults:
    """The faults that have not happened yet, and the step that runs now, -1 before the first (a
    start may try what it can do). They are put around an engine's parts, which know nothing of
    them; a part that no fault concerns stays as it is.
    """

    left: list[Fault]
    step: int = -1

    @classmethod
    def of(cls, texts: Iterable[str]) -> Faults:
        """The faults of these texts."""
        return cls([Fault.parse(text) for text in texts])

    def concern(self, *kinds: str) -> bool:
        """Whether a fault of one of these kinds is to come."""
        return any(fault.kind in kinds for fault in self.left)

    def due(self, kind: str, step: int) -> Iterator[Fault]:
        """The faults of `kind` that may happen in `step`; whoever makes one happen removes it from
        `left`.
        """
        yield from [fault for fault in self.left if fault.kind == kind and fault.step <= step]

    def strike(self, kind: str, step: int = 0) -> None:
        """Raise Injected when a fault of `kind` is due."""
        for fault in self.due(kind, step):
            self.left.remove(fault)
            raise Injected(f"{kind}@{fault.step}, as asked for")

    def around_allocation(self, allocate: Callable[..., Any]) -> Callable[..., Any]:
        """`allocate`, failing for want of memory when that was asked for."""

        def failing(*arguments: Any, **keywords: Any) -> Any:
            raise MemoryError("allocate, as asked for")

        return failing if self.concern("allocate") else allocate

    def around_choice(self, choose: Choose) -> Choose:
        """`choose`, raising in its step."""

        def raising(view: View, budget: Budget) -> Choice:
            self.strike("schedule", view.number)
            return choose(view, budget)

        return raising if self.concern("schedule") else choose

    def around_runner(self, runner: Runner) -> Runner:
        """`runner`, with the faults of forward passes and captures."""
        return FaultyRunner(runner, self) if self.concern("nan", "execute", "capture") else runner

    def around_executor(self, executor: Executor) -> Executor:
        """`executor`, with the faults of steps. Faults of the runner need it too: it tells which
        step runs.
        """
        return FaultyExecutor(executor, self) if self.left else executor


class FaultyExecutor(Executor):
    """Carries out plans as `inner` does, late or not at all where that was asked for."""

    def __init__(self, inner: Executor, faults: Faults) -> None:
        self.inner = inner
        self.faults = faults

    def execute(self, plan: Plan, new_rows: Mapping[int, Any]) -> Pending:
        """Launch `plan`."""
        self.faults.step = plan.number
        for fault in self.faults.due("slow", plan.number):
            self.faults.left.remove(fault)
            time.sleep(fault.value)
        return FaultyStep(self.inner.execute(plan, new_rows), self.faults, plan.number)

    def close(self) -> None:
        """Free the device, and say which faults never happened: whoever asked for them has tested
        nothing.
        """
        self.inner.close()
        if self.faults.left:
            LOG.warning(
                log_event(
                    "faults never happened",
                    faults=" ".join(fault.text for fault in self.faults.left),
                )
            )
            self.faults.left.clear()


@frozen(eq=False)
class FaultyStep(Pending):
    """A step whose result may be lost."""

    inner: Pending
    faults: Faults
    number: int

    def wait(self) -> Any:
        """What the step sampled."""
        outcome = self.inner.wait()
        self.faults.strike("wait", self.number)
        return outcome


class FaultyRunner(Runner):
    """Runs batches as `inner` does, with NaN in the rows that were asked for."""

    def __init__(self, inner: Runner, faults: Faults) -> None:
        self.inner = inner
        self.faults = faults

    def run(self, batch: Batch, attend: Attend) -> Sample:
        """What the batch's logit positions sample.   writes: batch.pools"""
        faults = self.faults
        faults.strike("execute", faults.step)

        def poisoned(q: Tensor, layer: int) -> Tensor:
            out = attend(q, layer)
            for fault in faults.due("nan", faults.step):
                hit = batch.token_rows == int(fault.value)
                if hit.any():
                    faults.left.remove(fault)
                    out[hit] = torch.nan
            return out

        return self.inner.run(batch, poisoned)

    def buckets(self, max_rows: int) -> tuple[int, ...]:
        """The batch sizes that `inner` would record."""
        return self.inner.buckets(max_rows)

    def prompt_buckets(self, max_tokens: int) -> tuple[int, ...]:
        """The token counts that `inner` would capture."""
        return self.inner.prompt_buckets(max_tokens)

    def capture(
        self, buckets: Sequence[int], report: CaptureProgress, prompt_buckets: Sequence[int] = ()
    ) -> Sequence[int]:
        """Record steps of these sizes."""
        if buckets:
            self.faults.strike("capture")
        return self.inner.capture(buckets, report, prompt_buckets)

    def decode(self, step: DecodeStep) -> Sample | None:
        """What the step samples, by a replay; None where NaN is due, which only `run` can make."""
        return None if self.is_poisoned(step.row_ids) else self.struck(self.inner.decode(step))

    def prompt(self, step: PromptStep) -> Sample | None:
        """What each row's last token samples, by a replay; None where NaN is due, which only `run`
        can make.
        """
        return None if self.is_poisoned(step.token_rows) else self.struck(self.inner.prompt(step))

    def is_poisoned(self, rows: np.ndarray) -> bool:
        """Whether NaN is due in one of these rows."""
        return any(int(fault.value) in rows for fault in self.faults.due("nan", self.faults.step))

    def struck(self, sample: Sample | None) -> Sample | None:
        """The sample of a replay, if there was one.

        raises: Injected when the step is to fail after its launch
        """
        if sample is not None:
            self.faults.strike("execute", self.faults.step)
        return sample

    def close(self) -> None:
        """Give back what was recorded."""
        self.inner.close()
