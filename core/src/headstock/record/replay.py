"""A recorded schedule, run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from attrs import fields, frozen

from headstock.errors import format_count
from headstock.record.file import Recording
from headstock.record.moment import Moment
from headstock.scheduler import Limits, Plan, State, initial, step

NEAR = 8
"""Entries of an array that are shown around a difference."""


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
class Replayed:
    """A step that was run again. It led to `after`, which is None when the step raised, as recorded
    or not.

    The owned values of `after` (index, tables, reference counts) hold until the next step is taken
    from the iterator.
    """

    moment: Moment
    after: State | None
    divergence: Divergence | None


def replay(moments: Iterator[Moment], limits: Limits) -> Iterator[Replayed]:
    """Each step run again by the pure scheduler, up to the first that differs."""
    state = initial(limits)
    for moment in moments:
        after, divergence = again(moment, state, limits)
        yield Replayed(moment=moment, after=after, divergence=divergence)
        if after is None or divergence is not None:
            return
        state = after


@frozen(kw_only=True)
class Verdict:
    """How a replay ended: after `steps` steps, with the recorded `error` of the last one if it
    failed. `whole` is False for a recording that breaks off.
    """

    steps: int
    divergence: Divergence | None
    error: str
    whole: bool

    def __str__(self) -> str:
        text = f"{format_count(self.steps, 'step')}, identical"
        if self.divergence is not None:
            text = str(self.divergence)
        elif self.error:
            text += f"; the last one fails as recorded: {self.error}"
        return text if self.whole else f"{text}; the recording breaks off there"


def replay_whole(
    recording: Recording, limits: Limits, see: Callable[[Replayed], None] | None = None
) -> Verdict:
    """Run a recording again from step 0; `see` is called with each step.   raises: ModelError"""
    steps, error = 0, ""
    divergence: Divergence | None = None
    for replayed in replay(recording.moments(), limits):
        steps += 1
        divergence, error = replayed.divergence, replayed.moment.error
        if see is not None:
            see(replayed)
    return Verdict(steps=steps, divergence=divergence, error=error, whole=recording.whole)


def again(moment: Moment, state: State, limits: Limits) -> tuple[State | None, Divergence | None]:
    """The state after the step, and how its plan differs."""
    try:
        after, plan = step(state, moment.events, limits)
    except Exception as error:
        kind = type(error).__name__
        if moment.error.partition(":")[0] == kind:
            return None, None
        recorded = moment.error or "a plan"
        return None, Divergence(
            step=moment.number, field="outcome", recorded=recorded, replayed=f"{kind}: {error}"
        )
    if moment.plan is None:
        return after, Divergence(
            step=moment.number, field="outcome", recorded=moment.error, replayed="a plan"
        )
    return after, difference(moment.number, moment.plan, plan)


def difference(number: int, recorded: Plan, replayed: Plan) -> Divergence | None:
    """The first field in which the plans differ."""
    for each in fields(Plan):
        ours, theirs = getattr(recorded, each.name), getattr(replayed, each.name)
        if not np.array_equal(ours, theirs):
            near = first_difference(ours, theirs)
            return Divergence(
                step=number, field=each.name, recorded=some(ours, near), replayed=some(theirs, near)
            )
    return None


def first_difference(ours: np.ndarray | int, theirs: np.ndarray | int) -> int:
    """The first position at which two arrays differ."""
    a, b = np.ravel(ours), np.ravel(theirs)
    size = min(len(a), len(b))
    unlike = np.flatnonzero(a[:size] != b[:size])
    return int(unlike[0]) if len(unlike) else size


def some(value: np.ndarray | int, near: int) -> str:
    """A number, or the entries of an array from position `near` on."""
    if not isinstance(value, np.ndarray):
        return str(value)
    flat = value.ravel()
    entries = " ".join(map(str, flat[near : near + NEAR].tolist())) + (
        " ..." if near + NEAR < len(flat) else ""
    )
    return f"[{entries}] from entry {near} of {len(flat)}"
