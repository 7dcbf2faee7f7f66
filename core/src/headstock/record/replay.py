"""A recorded schedule, run again.

Scheduling is deterministic: the same events give the same plans. A replay that is identical proves
that the plans depend on the recorded events alone, and that this scheduler and cache policy are
those of the recording. It says nothing of tokens, kernels or times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from attrs import fields, frozen

from headstock.errors import format_count
from headstock.record.file import Recording
from headstock.record.recorded_step import RecordedStep
from headstock.scheduler import Limits, Plan, State, initial_state, step

NUM_SHOWN = 8
"""Entries of an array that a divergence shows."""


@frozen(kw_only=True)
class Divergence:
    """Where a replay first differs from its recording."""

    step: int
    field: str
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return (
            f"step {self.step} differs in {self.field}: recorded {self.recorded}, replayed "
            f"{self.replayed}"
        )


@frozen(kw_only=True, eq=False)
class ReplayedStep:
    """A recorded step and the state that it led to; `after` is None when the step raised.

    `after` is valid until the next step is taken from the iterator, which writes it.
    """

    recorded: RecordedStep
    after: State | None
    divergence: Divergence | None


def replay_steps(recorded_steps: Iterator[RecordedStep], limits: Limits) -> Iterator[ReplayedStep]:
    """Run the scheduler over the recorded events, up to the first step that differs."""
    state = initial_state(limits)
    for recorded in recorded_steps:
        replayed = replay_step(recorded, state)
        yield replayed
        if replayed.after is None or replayed.divergence is not None:
            return


@frozen(kw_only=True)
class ReplayResult:
    """How a replay ended.

    `error` is that of the last step, which failed as recorded. `is_complete` is False for a
    recording that breaks off.
    """

    steps: int
    divergence: Divergence | None
    error: str
    is_complete: bool

    def __str__(self) -> str:
        text = f"{format_count(self.steps, 'step')}, identical"
        if self.divergence is not None:
            text = str(self.divergence)
        elif self.error:
            text += f"; the last one fails as recorded: {self.error}"
        return text if self.is_complete else f"{text}; the recording breaks off there"


def replay_recording(
    recording: Recording, limits: Limits, on_step: Callable[[ReplayedStep], None] | None = None
) -> ReplayResult:
    """Run a recording again from step 0 and call `on_step` with each step.   raises: ModelError"""
    steps, error = 0, ""
    divergence: Divergence | None = None
    for replayed in replay_steps(recording.read_steps(), limits):
        steps += 1
        divergence, error = replayed.divergence, replayed.recorded.error
        if on_step is not None:
            on_step(replayed)
    return ReplayResult(
        steps=steps, divergence=divergence, error=error, is_complete=recording.is_complete
    )


def replay_step(recorded: RecordedStep, state: State) -> ReplayedStep:
    """Run one step again.   writes: state"""
    after, divergence = _compare_step(recorded, state)
    return ReplayedStep(recorded=recorded, after=after, divergence=divergence)


def _compare_step(recorded: RecordedStep, state: State) -> tuple[State | None, Divergence | None]:
    """Run one step; return the state after it, and how its plan differs."""
    try:
        plan = step(state, recorded.events)
    except Exception as error:
        kind = type(error).__name__
        # the type alone: messages hold addresses, paths and words that a later version changes
        if recorded.error.partition(":")[0] == kind:
            return None, None
        return None, Divergence(
            step=recorded.number,
            field="outcome",
            recorded=recorded.error or "a plan",
            replayed=f"{kind}: {error}",
        )
    if recorded.plan is None:
        return state, Divergence(
            step=recorded.number, field="outcome", recorded=recorded.error, replayed="a plan"
        )
    return state, _compare_plans(recorded.number, recorded.plan, plan)


def _compare_plans(number: int, recorded: Plan, replayed: Plan) -> Divergence | None:
    """Return the first field in which the plans differ; None when they are equal."""
    for field in fields(Plan):
        ours, theirs = getattr(recorded, field.name), getattr(replayed, field.name)
        if not np.array_equal(ours, theirs):
            start = _first_difference(ours, theirs)
            return Divergence(
                step=number,
                field=field.name,
                recorded=_format_entries(ours, start),
                replayed=_format_entries(theirs, start),
            )
    return None


def _first_difference(ours: np.ndarray | int, theirs: np.ndarray | int) -> int:
    """Return the first position at which two arrays differ."""
    a, b = np.ravel(ours), np.ravel(theirs)
    size = min(len(a), len(b))
    unlike = np.flatnonzero(a[:size] != b[:size])
    return int(unlike[0]) if len(unlike) else size


def _format_entries(value: np.ndarray | int, start: int) -> str:
    """A number, or the entries of an array from position `start` on."""
    if not isinstance(value, np.ndarray):
        return str(value)
    flat = value.ravel()
    entries = " ".join(map(str, flat[start : start + NUM_SHOWN].tolist())) + (
        " ..." if start + NUM_SHOWN < len(flat) else ""
    )
    return f"[{entries}] from entry {start} of {len(flat)}"
