"""One scheduling step as a recording holds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from attrs import frozen

from headstock.scheduler import Event, Plan, RequestState


class PendingRecord(NamedTuple):
    """A step as the engine hands it over, before it is encoded.

    `at` is the time of planning in nanoseconds of a monotonic clock. `admitted` holds the requests
    that got rows, in the order of `plan.new_row_ids`. A step that raised has an error and no plan.
    """

    # References suffice: events and plans are frozen, so the writer may encode them later.

    at: int
    events: Sequence[Event]
    plan: Plan | None
    admitted: tuple[RequestState, ...] = ()
    error: str = ""


@frozen(kw_only=True)
class Admission:
    """A request that got a row; `preemptions` counts how often it lost one before."""

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
