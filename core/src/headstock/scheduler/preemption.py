"""Preempt running requests: their pages go to others, and they are computed again later."""

from __future__ import annotations

import numpy as np

from headstock.scheduler.admission import (
    count_prefix_tokens,
    has_room,
    match_prefix,
)
from headstock.scheduler.lifecycle import vacate_row
from headstock.scheduler.page_pool import append_row_pages, count_available_pages, retain_region
from headstock.scheduler.prefix_wait import must_wait_for_prefix
from headstock.scheduler.row_counters import RowCounter, any_set
from headstock.scheduler.state import State
from headstock.spi.arrays import Ints


def preempt_row(state: State, row: int) -> None:
    """Send the row's request back to the queue; its tokens stay and are computed again later."""
    request_state = state.requests_by_row[row]
    assert request_state is not None, f"row {row} is free and cannot be preempted"
    # Tokens in flight are dropped: the next admission has another id, and samples them again.
    num_known = int(state.row_counters[RowCounter.NUM_KNOWN, row])
    state.waiting = state.waiting.put(request_state.requeued(state.tokens[row, :num_known].copy()))
    retain_region(state, row)
    vacate_row(state, row)
    state.num_preempted += 1


def preempt_for_priority(state: State) -> None:
    """Preempt rows of lower priority than the head of the queue, until it fits.

    Nothing is preempted when the head fits already, or would not fit even then.
    """
    while state.waiting and len(state.rows_by_priority):
        request_state, lowest = state.waiting.head, int(state.rows_by_priority[-1])
        if state.row_counters[RowCounter.PRIORITY, lowest] >= request_state.request.priority:
            return
        # Matched anew each time: a preempted row's full pages stay in the index and may be a hit.
        prefix_hit = match_prefix(state, request_state)
        # A request that would wait is not admitted, so a preemption for it would be wasted.
        if must_wait_for_prefix(state, request_state, count_prefix_tokens(state, prefix_hit), []):
            return
        free_rows = state.limits.max_rows - len(state.rows_by_priority)
        if free_rows and has_room(state, request_state, prefix_hit):
            return
        # All rows of lower priority would not make room: none loses its pages for nothing.
        if not has_room(state, request_state, prefix_hit, below=request_state.request.priority):
            return
        preempt_row(state, lowest)


def preempt_until_fits(state: State, num_scheduled: Ints, needs: Ints) -> Ints:
    """Give the scheduled rows pages when these are short: preempt from the last row in priority.

    num_scheduled: [rows]    needs: [groups, rows], negative where a row has pages to spare
    returns: [rows], the tokens of each row that still runs
    """
    # Rows are served from the front and preempted from the back. So the first row never gives way
    # here and may take the pages of all others; every request fits the pool alone
    # (`find_refusal`). It goes on to its end, and two rows cannot keep preempting each other.
    running = state.rows_by_priority.tolist()
    still_running = np.zeros_like(num_scheduled)
    while running:
        row = running.pop(0)
        if not num_scheduled[row]:
            continue
        need = needs[:, row].tolist()
        while running and any(
            count > count_available_pages(state, group) for group, count in enumerate(need)
        ):
            preempt_row(state, running.pop())
        if any(count > count_available_pages(state, group) for group, count in enumerate(need)):
            if not any_set(still_running):
                # The scheduler passed over the rows before this one, and they hold the pages: this
                # one gives way, so that the next decision can run them.
                preempt_row(state, row)
            break  # all rows of lower priority are preempted, so this was the last
        for group, count in enumerate(need):
            if count > 0:
                append_row_pages(state, group, row, count)
        still_running[row] = num_scheduled[row]
    return still_running
