"""One step of scheduling: the same events give the same plans."""

from __future__ import annotations

from collections.abc import Sequence

from headstock.scheduler.admission import sort_rows
from headstock.scheduler.apply import apply_event
from headstock.scheduler.events import Event
from headstock.scheduler.invariants import check_state
from headstock.scheduler.page_pool import free_out_of_window
from headstock.scheduler.plan import Plan
from headstock.scheduler.planning import make_plan
from headstock.scheduler.preemption import preempt_for_priority
from headstock.scheduler.prefix_insert import insert_full_pages
from headstock.scheduler.row_counters import RowCounter, indices
from headstock.scheduler.selection import select_rows
from headstock.scheduler.snapshots import index_snapshots, take_snapshots
from headstock.scheduler.state import State


def step(state: State, events: Sequence[Event]) -> Plan:
    """Bring the state up to date with `events`, and return the plan of the work to launch next.

    writes: state, which a step that raises leaves half done
    """
    begin_step(state)
    apply_events(state, events)
    return finish_step(state)


def begin_step(state: State) -> None:
    """Begin a step; any number of `apply_events` and then `finish_step` complete it.

    Accepted tokens are therefore available before planning.

    writes: state
    """
    # New lists: callers may still read those of the last step.
    state.ended, state.accepted, state.new_row_ids = [], [], []
    state.held_back = set()
    state.next_ask = 0


def apply_events(state: State, events: Sequence[Event]) -> None:
    """Apply events in order.   writes: state"""
    # Before all else: events tell which rows failed, and what those computed must not reach the
    # index.
    for event in events:
        apply_event(state, event)


def finish_step(state: State) -> Plan:
    """Return the plan of the step.   writes: state"""
    limits = state.limits
    # Before admission, so that new rows share the pages that the last step filled.
    insert_full_pages(state)
    take_snapshots(state)
    index_snapshots(state)
    # Before the pages are counted: those behind a window serve this step already.
    for number, group in enumerate(limits.groups):
        if group.window is not None:
            free_out_of_window(state, number, indices(state.row_counters[RowCounter.ACTIVE]))
    # Before the scheduler plugin decides: it sees only rows and pages that are free then.
    preempt_for_priority(state)
    plan = make_plan(state, select_rows(state))
    # Last: only the next step reads the order of the new rows.
    sort_rows(state)
    state.num_steps += 1
    if limits.check:
        check_state(state, limits)
    return plan
