"""One step of scheduling: a pure function over frozen records."""

from __future__ import annotations

from collections.abc import Sequence

from headstock.scheduler.admission import sort_rows
from headstock.scheduler.apply import apply_event
from headstock.scheduler.events import Event
from headstock.scheduler.invariants import check_state
from headstock.scheduler.limits import Limits
from headstock.scheduler.page_pool import free_out_of_window
from headstock.scheduler.plan import Plan
from headstock.scheduler.planning import make_plan
from headstock.scheduler.preemption import preempt_for_priority
from headstock.scheduler.prefix_insert import insert_full_pages
from headstock.scheduler.row_counters import RowCounter, indices
from headstock.scheduler.selection import select_rows
from headstock.scheduler.state import State
from headstock.scheduler.working_state import WorkingState, to_state, to_working_state


def step(state: State, events: Sequence[Event], limits: Limits) -> tuple[State, Plan]:
    """Return the state after `events`, and the plan of the work to launch next.

    Only the owned values of `state` are written; everything else of it stays as it was.
    """
    working = begin_step(state, limits)
    apply_events(working, events)
    return finish_step(working)


def begin_step(state: State, limits: Limits) -> WorkingState:
    """Begin a step; any number of `apply_events` and then `finish_step` complete it.

    Accepted tokens are therefore available before planning.
    """
    return to_working_state(state, limits)


def apply_events(working: WorkingState, events: Sequence[Event]) -> None:
    """Apply events in order.   writes: working"""
    # Before all else: events tell which rows failed, and what those computed must not reach the
    # index.
    for event in events:
        apply_event(working, event)


def finish_step(working: WorkingState) -> tuple[State, Plan]:
    """Return the state that the step leads to, and its plan; `working` must not be used again."""
    limits = working.limits
    # Before admission, so that new rows share the pages that the last step filled.
    insert_full_pages(working)
    # Before the pages are counted: those behind a window serve this step already.
    for number, group in enumerate(limits.groups):
        if group.window is not None:
            free_out_of_window(working, number, indices(working.row_counters[RowCounter.ACTIVE]))
    # Before the scheduler plugin decides: it sees only rows and pages that are free then.
    preempt_for_priority(working)
    plan = make_plan(working, select_rows(working))
    # Last: only the next step reads the order of the new rows.
    sort_rows(working)
    state = to_state(working)
    if limits.check:
        check_state(state, limits)
    return state, plan
