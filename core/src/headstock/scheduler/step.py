"""One step of scheduling: a pure function over frozen records."""

from __future__ import annotations

from collections.abc import Sequence

from headstock.scheduler.admission import make_room, rank
from headstock.scheduler.apply import absorb
from headstock.scheduler.events import Event
from headstock.scheduler.invariants import check
from headstock.scheduler.limits import Limits
from headstock.scheduler.page_pool import drop_behind
from headstock.scheduler.plan import Plan
from headstock.scheduler.planning import commit
from headstock.scheduler.prefix_insert import index_full
from headstock.scheduler.row_counters import Column, where
from headstock.scheduler.selection import choose
from headstock.scheduler.state import State
from headstock.scheduler.working_state import draft_of, seal


def step(state: State, events: Sequence[Event], limits: Limits) -> tuple[State, Plan]:
    """The state after `events`, and the work to launch next.

    Of `state` only the owned values are written; everything else of it stays as it was.
    """
    draft = draft_of(state, limits)
    for event in events:
        absorb(draft, event)
    index_full(draft)
    for group, kind in enumerate(limits.groups):
        if kind.kind == "window":
            drop_behind(draft, group, where(draft.columns[Column.ACTIVE]))
    make_room(draft)
    plan = commit(draft, choose(draft))
    rank(draft)
    state = seal(draft)
    if limits.check:
        check(state, limits)
    return state, plan
