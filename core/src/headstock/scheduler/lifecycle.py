"""How a request leaves its row."""

from __future__ import annotations

from headstock.scheduler.events import Ended
from headstock.scheduler.page_pool import free_row_pages, retain_region
from headstock.scheduler.request import RequestState
from headstock.scheduler.row_counters import RowCounter, is_special
from headstock.scheduler.snapshots import settle_snapshots
from headstock.scheduler.state import State


def end_request(state: State, row: int, reason: str) -> None:
    """End the row's request: record why, free its pages and the row."""
    request_state = state.requests_by_row[row]
    assert request_state is not None, f"row {row} ended twice"
    counters = state.row_counters
    state.ended.append(
        Ended(
            id=request_state.request.id,
            row=row,
            admission_id=int(counters[RowCounter.ADMISSION_ID, row]),
            reason=reason,
            # Copied: the token table is written in place, and the row may get another request in
            # this very step, before the engine reads the tokens.
            tokens=state.tokens[row, : counters[RowCounter.NUM_KNOWN, row]].copy(),
            cached=int(counters[RowCounter.NUM_CACHED, row]),
            preemptions=request_state.preemptions,
        )
    )
    # A failed row may hold numbers that are not finite. Its region must not be found again.
    if reason != "error":
        retain_region(state, row)
    vacate_row(state, row)
    _drop_names(state, request_state)


def end_while_waiting(state: State, request_state: RequestState, reason: str) -> None:
    """End a request that has no row, and is in the queue no more: record why."""
    state.ended.append(
        Ended(
            id=request_state.request.id,
            row=-1,
            admission_id=0,
            reason=reason,
            tokens=request_state.tokens,
            cached=0,
            preemptions=request_state.preemptions,
        )
    )
    _drop_names(state, request_state)


def _drop_names(state: State, request_state: RequestState) -> None:
    """Forget that the request had its user and its adapter."""
    if request_state.user or request_state.adapter:
        state.users.drop(request_state.request.user)
        state.adapters.drop(request_state.request.adapter)


def vacate_row(state: State, row: int) -> None:
    """Free the row's pages and clear the row."""
    settle_snapshots(state, row)
    free_row_pages(state, row)
    # Table entries that no plan has carried yet name pages that others may hold from now on.
    state.writes = [
        (group, *(part[rows != row] for part in (rows, *rest)))
        for group, rows, *rest in state.writes
    ]
    state.num_special -= int(is_special(state.row_counters[:, row]))
    state.row_counters[:, row] = 0
    state.requests_by_row[row] = None
    state.rows_by_priority = state.rows_by_priority[state.rows_by_priority != row]
