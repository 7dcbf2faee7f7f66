"""One step of scheduling: a pure function over frozen records."""

from __future__ import annotations

from collections.abc import Sequence

from headstock.schedule.absorb import absorb
from headstock.schedule.admit import make_room, rank
from headstock.schedule.check import check
from headstock.schedule.choose import choose
from headstock.schedule.columns import Column, where
from headstock.schedule.commit import commit
from headstock.schedule.draft import draft_of, seal
from headstock.schedule.events import Event
from headstock.schedule.indexing import index_full
from headstock.schedule.limits import Limits
from headstock.schedule.pages import drop_behind
from headstock.schedule.plan import Plan
from headstock.schedule.state import State


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
