"""The working copy in which a step turns one state into the next."""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import define, field

from headstock.scheduler.contiguous import Region
from headstock.scheduler.events import Ended, Outcome, Paced
from headstock.scheduler.limits import Limits
from headstock.scheduler.name_table import NameTable
from headstock.scheduler.request import RequestState
from headstock.scheduler.row_counters import NONE, RowCounter
from headstock.scheduler.state import State, Write
from headstock.scheduler.waiting_queue import WaitingQueue
from headstock.spi.arrays import Ints


@define(eq=False)
class WorkingState:
    """A state in the making: copies that the step may write, and the owned values.

    A mutable twin of `State`, because frozen records cost several times as much (decision 0002).
    `rows_by_priority`, `stop_ids`, `first_pages` and `requests_by_row` start as the previous
    state's own; a write copies them first.
    held_back: window groups of which rows hold pages behind the window until these are indexed
    """

    limits: Limits
    previous: State
    row_counters: Ints
    rows_by_priority: Ints
    stop_ids: Ints
    requests_by_row: tuple[RequestState | None, ...] | list[RequestState | None]
    handles: list[Any]
    first_pages: Ints
    spans: Ints
    free: list[list[Ints]]
    num_free: list[int]
    waiting: WaitingQueue
    index: Any
    tokens: Ints
    table: Ints
    refs: tuple[np.ndarray, ...]
    users: NameTable
    adapters: NameTable
    num_admitted: int
    num_arrived: int
    num_preempted: int
    num_special: int
    may_draft: bool
    pace: Paced | None
    milliseconds: int
    regions: tuple[Region, ...]
    writes: list[Write]
    ended: list[Ended] = field(factory=list)
    accepted: list[tuple[Ints, Ints, Ints]] = field(factory=list)  # ids, counts, tokens
    new_row_ids: list[int] = field(factory=list)
    held_back: set[int] = field(factory=set)
    next_ask: int = 0
    rows_unsorted: bool = False  # `rows_by_priority` lacks the new rows

    def set_request(self, row: int, request_state: RequestState | None) -> None:
        """Give the row to a request, or free it."""
        if isinstance(self.requests_by_row, tuple):
            self.requests_by_row = list(self.requests_by_row)
        self.requests_by_row[row] = request_state


def to_working_state(state: State, limits: Limits) -> WorkingState:
    """Return a working copy that starts as `state`."""
    return WorkingState(
        limits,
        state,
        state.row_counters.copy(),
        state.rows_by_priority,
        state.stop_ids,
        state.requests_by_row,
        list(state.handles),
        state.first_pages,
        state.spans.copy(),
        [list(stack) for stack in state.free],
        list(state.num_free),
        state.waiting,
        state.index,
        state.tokens,
        state.table,
        state.refs,
        state.users,
        state.adapters,
        state.num_admitted,
        state.num_arrived,
        state.num_preempted,
        state.num_special,
        state.may_draft,
        state.pace,
        state.milliseconds,
        state.regions,
        list(state.writes),
    )


def to_state(working: WorkingState) -> State:
    """Return the read-only state that the working copy became."""
    # Read-only arrays make numpy raise when anything writes to an old state.
    for array in (
        working.row_counters,
        working.rows_by_priority,
        working.stop_ids,
        working.first_pages,
        working.spans,
    ):
        array.setflags(write=False)
    outcome = find_outcome(working)
    return State(
        row_counters=working.row_counters,
        rows_by_priority=working.rows_by_priority,
        stop_ids=working.stop_ids,
        requests_by_row=tuple(working.requests_by_row),
        handles=tuple(working.handles),
        first_pages=working.first_pages,
        spans=working.spans,
        free=tuple([tuple(stack) for stack in working.free]),
        num_free=tuple(working.num_free),
        waiting=working.waiting,
        index=working.index,
        tokens=working.tokens,
        table=working.table,
        refs=working.refs,
        users=working.users,
        adapters=working.adapters,
        regions=working.regions,
        writes=tuple(working.writes),
        ended=outcome.ended,
        accepted_ids=outcome.accepted_ids,
        accepted_counts=outcome.accepted_counts,
        accepted_tokens=outcome.accepted_tokens,
        num_admitted=working.num_admitted,
        num_arrived=working.num_arrived,
        num_steps=working.previous.num_steps + 1,
        num_preempted=working.num_preempted,
        num_special=working.num_special,
        may_draft=working.may_draft,
        pace=working.pace,
        milliseconds=working.milliseconds,
        next_ask=working.next_ask,
    )


def find_outcome(working: WorkingState) -> Outcome:
    """Return what requests got from the events that were applied."""
    parts, ended = working.accepted, tuple(working.ended)
    if len(parts) < 2:
        ids, counts, tokens = parts[0] if parts else (NONE, NONE, NONE)
    else:
        ids, counts, tokens = map(np.concatenate, zip(*parts, strict=True))
    return Outcome(ids, counts, tokens, ended)


def count_shareable_tokens(working: WorkingState) -> Ints:
    """Return how many tokens of each row may be shared or retained, [rows] int32.

    These are known tokens, computed by steps that are known to be done.
    """
    counters = working.row_counters
    num_done: Ints = np.minimum(counters[RowCounter.NUM_COMPUTED], counters[RowCounter.NUM_KNOWN])
    # Under overlap the latest plan still runs, and its step may fail.
    return (
        np.minimum(num_done, counters[RowCounter.NUM_COMPUTED_BEFORE])
        if working.limits.overlap
        else num_done
    )
