"""Requests that wait for a prefix which a running one is computing (docs/decisions/0012)."""

from __future__ import annotations

import numpy as np

from headstock.scheduler.request import RequestState
from headstock.scheduler.row_counters import RowCounter, indices
from headstock.scheduler.working_state import WorkingState
from headstock.spi.arrays import Ints

PrefixWait = tuple[RequestState, int, int]
"""A request that was found to wait in this step, for how many tokens, and the priority of the row
at work on them.
"""


def joins_prefix_wait(request_state: RequestState, waiting: list[PrefixWait]) -> bool:
    """Whether the entry waits as another does that begins alike: 1 us in place of 20 for each of
    many siblings.
    """
    request, tokens = request_state.request, request_state.tokens
    for other, stop, priority in waiting:
        if (
            stop < len(tokens)
            and tokens[stop - 1] == other.tokens[stop - 1]
            and request.priority <= priority
            and request.namespace == other.request.namespace
            and not request.prompt_logprobs
            and (tokens is other.tokens or _are_equal(tokens[:stop], other.tokens[:stop]))
        ):
            return True
    return False


def _are_equal(one: Ints, other: Ints) -> bool:
    """Whether equally many tokens are equal; four times as fast as `np.array_equal` for short
    ones.
    """
    return not np.count_nonzero(one != other)


def must_wait_for_prefix(
    state: WorkingState, request_state: RequestState, found: int, waiting: list[PrefixWait]
) -> bool:
    """Whether a running request of no lower priority is computing the page that follows the `found`
    tokens.

    It will be in the index a step or two later, and need not be computed twice.   writes: waiting
    """
    request = request_state.request
    if state.limits.policy is None or request.prompt_logprobs:
        return False
    counters, size = state.row_counters, state.limits.page_size
    stop = found + size
    if stop >= len(request_state.tokens):
        return False
    late = (counters[RowCounter.NUM_INDEXED] < stop // size) & (
        counters[RowCounter.NUM_KNOWN] >= stop
    )
    late &= counters[RowCounter.PRIORITY] >= request.priority
    rows = indices(late)
    if not len(rows):  # few requests are that near to their beginning
        return False
    for row in rows[state.tokens[rows, stop - 1] == request_state.tokens[stop - 1]].tolist():
        other = state.requests_by_row[row]
        together = other is not None and other.request.namespace == request.namespace
        if together and _are_equal(state.tokens[row, :stop], request_state.tokens[:stop]):
            waiting.append((request_state, stop, int(counters[RowCounter.PRIORITY, row])))
            return True
    return False
