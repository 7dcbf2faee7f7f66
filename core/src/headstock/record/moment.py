"""One scheduling step as a recording holds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from attrs import frozen

from headstock.scheduler import Event, Plan, RequestState


class Noted(NamedTuple):
    """A step as the engine hands it over: references alone, for nothing of it is written
    afterwards.

    `at`: nanoseconds on a clock that only goes forward, taken when the plan was made. `joined`:
    what the plan seated, in the order of `plan.joined`. A step that raised has no plan but an
    error.
    """

    at: int
    events: Sequence[Event]
    plan: Plan | None
    joined: tuple[RequestState, ...] = ()
    error: str = ""


@frozen(kw_only=True)
class Seated:
    """A request that a plan seated; `again` counts its earlier seats."""

    id: str
    row: int
    again: int


@frozen(kw_only=True, eq=False)
class Moment:
    """A step read from a recording; `number` counts from the engine's start."""

    number: int
    at: int
    events: tuple[Event, ...]
    plan: Plan | None
    seated: tuple[Seated, ...]
    error: str
