"""Apply events to the state."""

from __future__ import annotations

import numpy as np

from headstock.scheduler.draft_states import choose_states
from headstock.scheduler.events import (
    Aborted,
    Arrived,
    Cleared,
    Clock,
    Event,
    Failed,
    Paced,
    Pooled,
    Sampled,
)
from headstock.scheduler.lifecycle import end_request, end_while_waiting
from headstock.scheduler.limits import find_refusal
from headstock.scheduler.page_pool import clear_index, recompute_rows
from headstock.scheduler.prefix_insert import insert_last_pages
from headstock.scheduler.request import Request, RequestState
from headstock.scheduler.row_counters import (
    NONE,
    RowCounter,
    all_set,
    any_set,
    count_drafts,
    indices,
)
from headstock.scheduler.state import State
from headstock.spi.arrays import Ints


def apply_event(state: State, event: Event) -> None:
    """Apply one event to the state."""
    match event:
        case Sampled():
            apply_samples(state, event)
        case Clock():
            state.milliseconds = event.milliseconds
        case Arrived(request):
            _apply_arrival(state, request)
        case Aborted(id, reason):
            apply_abort(state, id, reason)
        case Pooled():
            rows = _find_live_rows(state, event)
            insert_last_pages(state, rows)
            for row in rows.tolist():
                end_request(state, row, "stop")
        case Failed():
            for row in _find_live_rows(state, event).tolist():
                end_request(state, row, "error")
        case Cleared():
            clear_index(state)
        case Paced():
            state.pace = event


def _find_live_rows(state: State, event: Pooled | Failed) -> Ints:
    """Find the rows of the event that still run the request that it is about, [n] int32.

    Under overlap a row may run another request by now; its admission id tells.
    """
    live = state.row_counters[RowCounter.ADMISSION_ID, event.rows] == event.admission_ids
    rows: Ints = event.rows[live]
    return rows


def _apply_arrival(state: State, request: Request) -> None:
    """Queue the request, or end it at once when it can never fit."""
    state.num_arrived += 1
    request_state = RequestState(
        request=request,
        tokens=request.prompt,
        arrival=state.num_arrived,
        arrived_at=state.milliseconds,
        user=state.users.add(request.user),
        adapter=state.adapters.add(request.adapter),
    )
    # Admission stops at the first request without room: one that never fits would block the queue.
    if find_refusal(request, state.limits) is not None:
        end_while_waiting(state, request_state, "error")
    else:
        state.waiting = state.waiting.put(request_state)


def apply_abort(state: State, id: str, reason: str) -> None:
    """End the request, running or waiting; an unknown id changes nothing."""
    for row, request_state in enumerate(state.requests_by_row):
        if request_state is not None and request_state.request.id == id:
            end_request(state, row, reason)
            return
    for request_state in state.waiting:
        if request_state.request.id == id:
            state.waiting = state.waiting.without({request_state.arrival})
            end_while_waiting(state, request_state, reason)
            return


def apply_samples(state: State, event: Sampled) -> None:
    """Append sampled tokens, end rows at a stop id or their length, and append drafts."""
    rows = event.rows.astype(np.int64)  # numpy would convert 32 bits anew for each use as an index
    live = state.row_counters[RowCounter.ADMISSION_ID].take(rows) == event.admission_ids
    if event.counts is None and all_set(live):
        _apply_single_samples(state, event, rows)
    else:
        _apply_any_samples(state, event, live)


def _apply_any_samples(state: State, event: Sampled, live: Ints) -> None:
    """As `apply_samples`, for any event.

    A row that verified drafts goes back to its last accepted token: what was computed for
    rejected drafts does not count.
    live: [n] bool, the event's rows that still run the request that was sampled for
    """
    counters, rows = state.row_counters, event.rows[live]
    grid, counts = _pad_ragged(
        event.tokens, np.ones_like(event.rows) if event.counts is None else event.counts
    )
    grid, counts = grid[live], counts[live]
    num_known = counters[RowCounter.NUM_KNOWN, rows]
    lengths = num_known[:, None] + np.arange(1, grid.shape[1] + 1, dtype=np.int32)
    in_range = lengths <= (num_known + counts)[:, None]
    stops = (state.stop_ids.T[rows][:, None, :] == grid[:, :, None]).any(2) & (
        lengths >= counters[RowCounter.MIN_LEN, rows][:, None]
    )
    ends = in_range & (stops | (lengths > counters[RowCounter.LAST_POSITION, rows][:, None]))
    finished = ends.any(1)
    if finished.any():
        # Tokens accepted after a stop id or the last position are dropped.
        counts = np.where(finished, ends.argmax(1) + 1, counts).astype(np.int32)
        in_range = lengths <= (num_known + counts)[:, None]
    picked = np.nonzero(in_range)
    state.tokens[rows[picked[0]], lengths[picked] - 1] = grid[picked]
    state.accepted.append((counters[RowCounter.ADMISSION_ID, rows], counts, grid[picked]))
    _sync_counters(counters, rows, num_known + counts)
    choose_states(state, rows)
    if state.limits.recompute:
        recompute_rows(state, rows)
    if state.limits.max_drafts:
        counters[RowCounter.HELD, rows] = event.hold[live] if len(event.hold) else 0
        _append_drafts(state, event, live, finished)
        # Nothing else gives a row drafts, so steps after this need not look for any.
        state.may_draft = any_set(counters[RowCounter.HELD]) or any_set(count_drafts(counters))
    # Last: ending a row clears its counters, which the calls above still read.
    insert_last_pages(state, rows[finished])
    for row, at in zip(rows[finished].tolist(), indices(finished).tolist(), strict=True):
        end_request(state, row, "stop" if stops[at, counts[at] - 1] else "length")


def _apply_single_samples(state: State, event: Sampled, rows: Ints) -> None:
    """As `apply_samples`, when every row is live and got the token of its placeholder.

    It works on whole columns: at these sizes that is four times as fast as picking the event's
    rows out of them.
    rows: [n] int64, the event's
    """
    counters = state.row_counters
    num_known = counters[RowCounter.NUM_KNOWN]
    state.tokens[rows, num_known.take(rows)] = event.tokens
    added = np.zeros(len(num_known), np.int32)
    added[rows] = 1
    num_known += added
    counters[RowCounter.NUM_PLACEHOLDERS] -= added
    if state.limits.recompute:
        recompute_rows(state, rows)
    state.accepted.append((event.admission_ids, added.take(rows), event.tokens))
    finished = num_known > counters[RowCounter.LAST_POSITION]
    stopped = NONE
    stops = state.stop_ids.take(rows, axis=1) == event.tokens
    # Few rows sample a stop id, so only those are compared with their shortest length.
    if any_set(stops):
        stopped = rows[stops.nonzero()[1]]
        stopped = stopped[num_known[stopped] >= counters[RowCounter.MIN_LEN][stopped]]
        finished[stopped] = True
    if any_set(finished):
        ended = rows[finished[rows]]
        # A request of one token fills pages in its last step alone.
        insert_last_pages(state, ended)
        for row in ended.tolist():
            end_request(state, row, "stop" if row in stopped else "length")


def _pad_ragged(tokens: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Return ragged tokens as a grid padded with -1, [n, longest] int32, and the counts."""
    grid = np.full((len(counts), max(int(counts.max(initial=0)), 1)), -1, np.int32)
    grid[np.arange(grid.shape[1]) < counts[:, None]] = tokens
    return grid, counts


def _sync_counters(counters: Ints, rows: Ints, num_known: Ints) -> None:
    """Set the rows' counters to `num_known` known tokens each."""
    num_placeholders = counters[RowCounter.NUM_PLACEHOLDERS, rows]
    counters[RowCounter.NUM_KNOWN, rows] = num_known
    # A plan that verifies drafts makes no placeholder, as it may accept any number of tokens.
    verified = num_placeholders == 0
    counters[RowCounter.NUM_PLACEHOLDERS, rows] = np.maximum(num_placeholders - 1, 0)
    if verified.any():
        back = rows[verified]
        counters[RowCounter.NUM_TOKENS, back] = num_known[verified]
        # The last accepted token was sampled, not computed; it is the next one to compute.
        counters[RowCounter.NUM_COMPUTED, back] = np.minimum(
            counters[RowCounter.NUM_COMPUTED, back], num_known[verified] - 1
        )


def _append_drafts(state: State, event: Sampled, live: Ints, finished: Ints) -> None:
    """Append drafts to the rows that go on; they count as tokens, not as known ones."""
    if not len(event.drafts):
        return
    counters = state.row_counters
    grid, counts = _pad_ragged(event.drafts, event.draft_counts)
    goes_on = counts > 0
    goes_on[live] &= ~finished
    goes_on &= live
    rows, grid, counts = event.rows[goes_on], grid[goes_on], counts[goes_on]
    in_flight = counters[RowCounter.NUM_PLACEHOLDERS, rows] > 0
    assert not any_set(in_flight), (
        f"rows {rows[in_flight]} got drafts while tokens were in flight; they must wait for these"
    )
    num_known = counters[RowCounter.NUM_KNOWN, rows]
    # The token after the last draft must still fit.
    counts = np.minimum(counts, counters[RowCounter.LAST_POSITION, rows] - num_known)
    if state.limits.keeps_state:
        # There is a page behind each draft, and none behind tokens that come before them.
        counts[counters[RowCounter.NUM_COMPUTED, rows] < num_known - 1] = 0
    which, column = np.nonzero(np.arange(grid.shape[1]) < counts[:, None])
    state.tokens[rows[which], num_known[which] + column] = grid[which, column]
    counters[RowCounter.NUM_TOKENS, rows[counts > 0]] = (num_known + counts)[counts > 0]
