"""How a request leaves its row: it ends, or goes back to the queue."""

from __future__ import annotations

from headstock.scheduler.events import Ended
from headstock.scheduler.page_pool import keep_region, release
from headstock.scheduler.row_counters import Column
from headstock.scheduler.working_state import Draft


def end(draft: Draft, row: int, reason: str) -> None:
    """The row's request has ended: give everything back and say so."""
    entry = draft.seats[row]
    assert entry is not None, f"row {row} ended twice"
    column = draft.columns
    draft.ended.append(
        Ended(
            id=entry.request.id,
            row=row,
            order=int(column[Column.ORDER, row]),
            reason=reason,
            # the seat may be taken at once
            tokens=draft.tokens[row, : column[Column.NUM_KNOWN, row]].copy(),
            cached=int(column[Column.CACHED, row]),
            preemptions=entry.preemptions,
        )
    )
    if reason != "error":
        keep_region(draft, row)
    unseat(draft, row)


def preempt(draft: Draft, row: int) -> None:
    """Send the row's request back to the queue; its tokens stay and are computed again later."""
    entry = draft.seats[row]
    assert entry is not None, f"row {row} is free and cannot be preempted"
    known = int(draft.columns[Column.NUM_KNOWN, row])
    draft.waiting = draft.waiting.put(entry.preempted(draft.tokens[row, :known].copy()))
    keep_region(draft, row)
    unseat(draft, row)
    draft.num_preempted += 1


def unseat(draft: Draft, row: int) -> None:
    """Free the row's pages and its seat."""
    release(draft, row)
    draft.writes = [
        (group, *(part[rows != row] for part in (rows, *rest)))
        for group, rows, *rest in draft.writes
    ]
    draft.num_special -= int(draft.columns[Column.FENCED, row] | draft.columns[Column.SCORED, row])
    draft.columns[:, row] = 0
    draft.seats[row] = None
    draft.ranked = draft.ranked[draft.ranked != row]
