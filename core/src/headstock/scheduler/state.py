"""What a scheduler knows of its requests, which a step writes in place."""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import define, field, frozen

from headstock.scheduler.contiguous import Region
from headstock.scheduler.events import Ended, Outcome, Paced
from headstock.scheduler.limits import Limits
from headstock.scheduler.name_table import NameTable
from headstock.scheduler.request import RequestState
from headstock.scheduler.row_counters import NONE, NUM_COUNTERS, RowCounter
from headstock.scheduler.waiting_queue import WaitingQueue
from headstock.spi.arrays import Ints

Write = tuple[int, Ints, Ints, Ints]
"""Entries of a page table: the group, and rows, columns and pages, each [n]."""


@frozen
class Snapshot:
    """The state of a sequence behind its first `num_tokens`.

    pages: [state groups], in the order of `Limits.state_groups`
    """

    num_tokens: int
    pages: tuple[int, ...]


@define(kw_only=True, eq=False)
class State:
    """The scheduler's knowledge of its requests. Each step writes it.

    Code that keeps part of it beyond the next step must copy it. A step that raises leaves it
    half done, and no other may follow.

    row_counters: [counters, rows] int32, by `RowCounter`
    rows_by_priority: [running] int32, rows in use in priority order
    stop_ids: [width, rows] int32, padded with -1
    requests_by_row, handles: [rows], None where the row is free or shares no prefix
    first_pages, spans: [groups, rows] int32, the page-table columns where the live pages begin
        (those before are out of the window) and end
    free: by group, a stack of [n] int32, popped from its end; `num_free` counts the pages
    waiting: the queue, in priority order
    index: of the cache policy
    tokens: [rows, max_len in whole pages] int32
    table: [groups, rows, columns] int32, pages by row, valid from first_pages up to spans
    refs: by group, [pages + 1] uint16, the rows that hold each page
    users, adapters: the numbers of these names
    regions: of ended sequences, oldest first, for requests that continue them
    writes: page-table entries that no plan has carried yet
    copies: pages to copy that no plan has carried yet: by group and page that is written, the page
        whose content it gets; all are read before any is written
    snapshots: by row, copies of its state that the index has not got yet
    num_special: running requests with wait_for_sample (which may have drafts), prompt_logprobs or
        pooling
    may_draft: some row has drafts to verify, or is held for them; False is certain
    pace: the bound on prompt tokens; None: none but the step's
    milliseconds: the clock of the last step
    next_ask: by that clock, until when the scheduler asked not to be asked again if nothing runs;
        0 for not at all

    Of the last step, or the present one:

    ended: the requests that ended
    accepted: the tokens that requests got, in parts: admission ids and counts, [n] int32, and the
        tokens, [sum of the counts] int32
    new_row_ids: rows that got a request
    held_back: window groups whose rows hold pages behind the window until these are indexed
    rows_unsorted: `rows_by_priority` lacks the new rows
    """

    limits: Limits
    row_counters: Ints
    rows_by_priority: Ints = NONE
    stop_ids: Ints
    requests_by_row: list[RequestState | None]
    handles: list[Any]
    first_pages: Ints
    spans: Ints
    free: list[list[Ints]]
    num_free: list[int]
    waiting: WaitingQueue = field(factory=WaitingQueue)
    index: Any
    tokens: Ints
    table: Ints
    refs: tuple[np.ndarray, ...]
    users: NameTable = field(factory=NameTable)
    adapters: NameTable = field(factory=NameTable)
    regions: tuple[Region, ...] = ()
    writes: list[Write] = field(factory=list)
    copies: dict[tuple[int, int], int] = field(factory=dict)
    snapshots: dict[int, list[Snapshot]] = field(factory=dict)
    num_admitted: int = 0
    num_arrived: int = 0
    num_steps: int = 0
    num_preempted: int = 0
    num_special: int = 0
    may_draft: bool = False
    pace: Paced | None = None
    milliseconds: int = 0
    next_ask: int = 0
    ended: list[Ended] = field(factory=list)
    accepted: list[tuple[Ints, Ints, Ints]] = field(factory=list)
    new_row_ids: list[int] = field(factory=list)
    held_back: set[int] = field(factory=set)
    rows_unsorted: bool = False

    @property
    def num_running(self) -> int:
        """How many rows are in use."""
        return len(self.rows_by_priority)

    @property
    def pages(self) -> tuple[tuple[Ints, ...], ...]:
        """By group and row, the live pages, each [n] int32, copied out of the table."""
        bounds = zip(self.table, self.first_pages.tolist(), self.spans.tolist(), strict=True)
        return tuple(
            tuple(row[first:span].copy() for row, first, span in zip(*group, strict=True))
            for group in bounds
        )

    @property
    def outcome(self) -> Outcome:
        """What requests got from the events that were applied."""
        parts = self.accepted
        if len(parts) < 2:
            ids, counts, tokens = parts[0] if parts else (NONE, NONE, NONE)
        else:
            ids, counts, tokens = map(np.concatenate, zip(*parts, strict=True))
        return Outcome(ids, counts, tokens, tuple(self.ended))


def initial_state(limits: Limits) -> State:
    """Return a state in which nothing runs and every page is free."""
    # A state group uses few columns; one array lets a step handle all groups at once.
    rows, groups = limits.max_rows, len(limits.groups)
    columns = max(limits.pages_for(limits.max_len), limits.state_pages * limits.keeps_state)
    return State(
        limits=limits,
        row_counters=np.zeros((NUM_COUNTERS, rows), np.int32),
        stop_ids=np.full((1, rows), -1, np.int32),
        requests_by_row=[None] * rows,
        handles=[None] * rows,
        first_pages=np.zeros((groups, rows), np.int32),
        spans=np.zeros((groups, rows), np.int32),
        # Descending, so that low pages go out first.
        free=[[np.arange(count, 0, -1, dtype=np.int32)] for count in limits.num_pages],
        num_free=list(limits.num_pages),
        index=limits.policy.new_index() if limits.policy else None,
        tokens=np.zeros((rows, columns * limits.page_size), np.int32),
        table=np.zeros((groups, rows, columns), np.int32),
        refs=tuple(np.zeros(count + 1, np.uint16) for count in limits.num_pages),
    )


def count_shareable_tokens(state: State) -> Ints:
    """Return how many tokens of each row may be shared or retained, [rows] int32.

    These are known tokens, computed by steps that are known to be done.
    """
    counters = state.row_counters
    num_done: Ints = np.minimum(counters[RowCounter.NUM_COMPUTED], counters[RowCounter.NUM_KNOWN])
    # Under overlap the latest plan still runs, and its step may fail.
    return (
        np.minimum(num_done, counters[RowCounter.NUM_COMPUTED_BEFORE])
        if state.limits.overlap
        else num_done
    )
