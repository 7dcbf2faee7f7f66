"""One step of scheduling: a pure function over frozen records."""

from __future__ import annotations

from collections.abc import Sequence

from headstock.scheduler.admission import make_room, sort_rows
from headstock.scheduler.apply import absorb
from headstock.scheduler.events import Event
from headstock.scheduler.invariants import check
from headstock.scheduler.limits import Limits
from headstock.scheduler.page_pool import drop_behind
from headstock.scheduler.plan import Plan
from headstock.scheduler.planning import commit
from headstock.scheduler.prefix_insert import index_full
from headstock.scheduler.row_counters import RowCounter, where
from headstock.scheduler.selection import select_rows
from headstock.scheduler.state import State
from headstock.scheduler.working_state import to_state, to_working_state


def step(state: State, events: Sequence[Event], limits: Limits) -> tuple[State, Plan]:
    """The state after `events`, and the work to launch next.

    Of `state` only the owned values are written; everything else of it stays as it was.
    """
    working = to_working_state(state, limits)
    for event in events:
        absorb(working, event)
    index_full(working)
    for group, kind in enumerate(limits.groups):
        if kind.kind == "window":
            drop_behind(working, group, where(working.row_counters[RowCounter.ACTIVE]))
    make_room(working)
    plan = commit(working, select_rows(working))
    sort_rows(working)
    state = to_state(working)
    if limits.check:
        check(state, limits)
    return state, plan
