"""Insert pages into the prefix index as they fill."""

from __future__ import annotations

import numpy as np

from headstock.scheduler.page_pool import expand_intervals, free_pages, write_page_table
from headstock.scheduler.policy_answers import check_inserted
from headstock.scheduler.row_counters import RowCounter, any_set, indices, read_only
from headstock.scheduler.state import State, count_shareable_tokens
from headstock.spi.arrays import Ints
from headstock.spi.cache import CachePolicy


def insert_full_pages(state: State) -> None:
    """Insert every page that has become full of shareable tokens."""
    policy, size = state.limits.policy, state.limits.page_size
    if policy is None:
        return
    full = count_shareable_tokens(state) // size
    indexed = state.row_counters[RowCounter.NUM_INDEXED]
    rows = indices(full > indexed)
    if len(rows):
        starts, stops = indexed.take(rows), full.take(rows)
        indexed[rows] = stops
        _insert_pages(state, policy, rows, starts, stops - starts)


def insert_last_pages(state: State, rows: Ints) -> None:
    """Insert the full pages of rows that end with the token that was sampled last.

    All tokens but that one were computed by steps that are done.
    rows: [n]
    """
    policy, size = state.limits.policy, state.limits.page_size
    if policy is None:
        return
    counters = state.row_counters
    starts = counters[RowCounter.NUM_INDEXED].take(rows)
    counts = (counters[RowCounter.NUM_KNOWN].take(rows) - 1) // size - starts
    any_full = counts > 0
    if any_set(any_full):
        counters[RowCounter.NUM_INDEXED, rows] += np.maximum(counts, 0)
        _insert_pages(state, policy, rows[any_full], starts[any_full], counts[any_full])


def _insert_pages(
    state: State, policy: CachePolicy, rows: Ints, starts: Ints, counts: Ints
) -> None:
    """Insert `counts` pages of each of the rows, from table columns `starts` on.

    rows, starts, counts: [n]
    """
    numbers, handles, requests = rows.tolist(), state.handles, state.requests_by_row
    columns = starts
    if any_set(counts > 1):
        rows, columns = expand_intervals(rows, starts, counts)
    # Token table and page tables have the same pages a row, so one number finds a page in both:
    # half of the time that pairs of indices take.
    table = state.table
    places = rows * table.shape[2] + columns
    tokens = state.tokens.reshape(-1, state.limits.page_size).take(places, axis=0)
    own = table.reshape(len(table), -1).take(places, axis=1)
    for group in state.limits.state_groups:
        own[group] = 0
    answer = policy.insert_each(
        state.index,
        [handles[row] for row in numbers],
        counts.tolist(),
        read_only(tokens),
        read_only(own),
        [
            request_state.request.prefix_namespace
            if (request_state := requests[row]) is not None
            else ""
            for row in numbers
        ],
    )
    canonical, ends = check_inserted(state.limits, answer, own, len(numbers))
    for row, end in zip(numbers, ends, strict=True):
        handles[row] = end
    # Policies return `own` itself when no page was a duplicate: the usual case costs no loop.
    if canonical is not own:
        stop = 0
        for row, column, count in zip(numbers, starts.tolist(), counts.tolist(), strict=True):
            start, stop = stop, stop + count
            for group in range(len(own)):
                dedup_pages(
                    state, group, row, column, own[group, start:stop], canonical[group, start:stop]
                )


def dedup_pages(
    state: State, group: int, row: int, column: int, own: Ints, canonical: Ints
) -> None:
    """Move the row from its own pages to those that the index has for the same tokens.

    own, canonical: [n] int32, from `column` on
    """
    changed = canonical != own
    if not any_set(changed):
        return
    # Rows that compute the same tokens at once each fill a page of their own; the index keeps the
    # first. The row changes to it, so that what its handle holds is what its table names. A
    # duplicate could never be matched, and would take memory as long as the row runs.
    # The table changes before the duplicates are freed, so no row ever names a free page.
    write_page_table(state, group, row, column, canonical)
    refs = state.refs[group]
    refs[canonical[changed]] += np.uint16(1)
    refs[own[changed]] -= np.uint16(1)
    free_pages(state, group, own[changed])
