"""Requests that wait for a prefix which a running one is computing (docs/decisions/0012)."""

from __future__ import annotations

import numpy as np

from headstock.scheduler.request import RequestState
from headstock.scheduler.row_counters import RowCounter, indices
from headstock.scheduler.state import State
from headstock.spi.arrays import Ints

PrefixWait = tuple[RequestState, int, int]
"""A request that waits in this step, for how many tokens, and the priority of the row that computes
them."""


def joins_prefix_wait(request_state: RequestState, waiting: list[PrefixWait]) -> bool:
    """Return whether the request shares the prefix that another was found to wait for.

    This takes 1 us instead of 20, for each of many requests with one prompt.
    """
    request, tokens = request_state.request, request_state.tokens
    for other, stop, priority in waiting:
        if (
            stop < len(tokens)
            and tokens[stop - 1] == other.tokens[stop - 1]
            and request.priority <= priority
            and request.prefix_namespace == other.request.prefix_namespace
            and request.takes_prefix_hits
            and (tokens is other.tokens or _are_equal(tokens[:stop], other.tokens[:stop]))
        ):
            return True
    return False


def _are_equal(one: Ints, other: Ints) -> bool:
    """Return whether equally many tokens are equal.

    For short arrays this is four times as fast as `np.array_equal`.
    """
    return not np.count_nonzero(one != other)


def must_wait_for_prefix(
    state: State, request_state: RequestState, found: int, waiting: list[PrefixWait]
) -> bool:
    """Return whether a running row is computing the page after the request's prefix hit.

    That page is in the index a step or two later, and need not be computed twice.
    found: tokens of the prefix hit    writes: waiting
    """
    request = request_state.request
    if state.limits.policy is None or not request.takes_prefix_hits:
        return False
    counters, size = state.row_counters, state.limits.page_size
    every = state.limits.snapshot_tokens
    # With states the next hit is at the next snapshot of a prompt.
    stop = (found // every + 1) * every if every else found + size
    if stop >= len(request_state.tokens):
        return False
    # Asked anew at every step: once the row is gone, the request computes the page itself.
    late = (counters[RowCounter.NUM_INDEXED] < stop // size) & (
        counters[RowCounter.NUM_PROMPT if every else RowCounter.NUM_KNOWN] >= stop
    )
    # A row of lower priority may be preempted before it fills the page.
    late &= counters[RowCounter.PRIORITY] >= request.priority
    rows = indices(late)
    if not len(rows):  # the usual case: few rows are in their first pages
        return False
    # One token is compared first: it rules out most rows without a look at the whole prefix.
    for row in rows[state.tokens[rows, stop - 1] == request_state.tokens[stop - 1]].tolist():
        other = state.requests_by_row[row]
        together = other is not None and other.request.prefix_namespace == request.prefix_namespace
        if together and _are_equal(state.tokens[row, :stop], request_state.tokens[:stop]):
            waiting.append((request_state, stop, int(counters[RowCounter.PRIORITY, row])))
            return True
    return False
