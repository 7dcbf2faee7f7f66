"""One scheduling step as a recording holds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from attrs import frozen

from headstock.scheduler import Event, Plan, RequestState


class PendingRecord(NamedTuple):
    """A step as the engine hands it over: references alone, for nothing of it is written
    afterwards.

    `at`: nanoseconds on a clock that only goes forward, taken when the plan was made. `admitted`:
    what the plan seated, in the order of `plan.new_row_ids`. A step that raised has no plan but an
    error.
    """

    at: int
    events: Sequence[Event]
    plan: Plan | None
    admitted: tuple[RequestState, ...] = ()
    error: str = ""


@frozen(kw_only=True)
class Admission:
    """A request that a plan gave a row, after that many preemptions."""

    id: str
    row: int
    preemptions: int


@frozen(kw_only=True, eq=False)
class RecordedStep:
    """A step read from a recording; `number` counts from the engine's start."""

    number: int
    at: int
    events: tuple[Event, ...]
    plan: Plan | None
    admissions: tuple[Admission, ...]
    error: str
