"""The scheduler's state between two steps."""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import frozen

from headstock.scheduler.contiguous import Region
from headstock.scheduler.events import Ended, Paced
from headstock.scheduler.limits import Limits
from headstock.scheduler.name_table import NameTable
from headstock.scheduler.request import RequestState
from headstock.scheduler.row_counters import NONE, NUM_COUNTERS, read_only
from headstock.scheduler.waiting_queue import WaitingQueue
from headstock.spi.arrays import Ints

Write = tuple[int, Ints, Ints, Ints]
"""Entries of a page table: the group, and rows, columns and pages, each [n]."""


# Without slots: attrs fills a frozen record of so many fields a third faster.
@frozen(kw_only=True, eq=False, slots=False)
class State:
    """The scheduler's knowledge between two steps; all arrays but the owned ones are read-only.

    row_counters: [counters, rows] int32, by `RowCounter`
    rows_by_priority: [running] int32, rows in use in priority order
    stop_ids: [width, rows] int32, padded with -1
    requests_by_row, handles: [rows], None where the row is free or shares no prefix
    first_pages, spans: [groups, rows] int32, the page-table columns where the live pages begin
        (those before are out of the window) and end
    free: by group, a stack of [n] int32, popped from its end; `num_free` counts the pages
    waiting: the queue, in priority order
    regions: of ended sequences, oldest first, for requests that continue them
    writes: page-table entries that no plan has carried yet
    ended, accepted: results of the last step's events
    num_special: running requests with wait_for_sample (which may have drafts), prompt_logprobs or
        pooling
    may_draft: some row has drafts to verify, or is held for them; False is certain
    pace: the bound on prompt tokens; None: none but the step's
    milliseconds: the clock of the last step
    next_ask: by that clock, until when the scheduler asked not to be asked again if nothing runs;
        0 for not at all

    Owned values pass from state to state and are written in place, since a copy in each step would
    cost more than the step (decision 0013). Never read those of an old state:

    index: of the cache policy
    tokens: [rows, max_len in whole pages] int32
    table: [groups, rows, columns] int32, pages by row, valid from first_pages up to spans
    refs: by group, [pages + 1] uint16, the rows that hold each page
    users, adapters: the numbers of these names
    """

    row_counters: Ints
    rows_by_priority: Ints
    stop_ids: Ints
    requests_by_row: tuple[RequestState | None, ...]
    handles: tuple[Any, ...]
    first_pages: Ints
    spans: Ints
    free: tuple[tuple[Ints, ...], ...]
    num_free: tuple[int, ...]
    waiting: WaitingQueue
    index: Any
    tokens: Ints
    table: Ints
    refs: tuple[np.ndarray, ...]
    users: NameTable
    adapters: NameTable
    regions: tuple[Region, ...] = ()
    writes: tuple[Write, ...] = ()
    ended: tuple[Ended, ...] = ()
    accepted_ids: Ints = NONE
    accepted_counts: Ints = NONE
    accepted_tokens: Ints = NONE
    num_admitted: int = 0
    num_arrived: int = 0
    num_steps: int = 0
    num_preempted: int = 0
    num_special: int = 0
    may_draft: bool = False
    pace: Paced | None = None
    milliseconds: int = 0
    next_ask: int = 0

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


def initial_state(limits: Limits) -> State:
    """Return a state in which nothing runs and every page is free."""
    # A state group uses the first column alone; one array lets a step handle all groups at once.
    rows, groups, columns = limits.max_rows, len(limits.groups), limits.pages_for(limits.max_len)
    return State(
        row_counters=read_only(np.zeros((NUM_COUNTERS, rows), np.int32)),
        rows_by_priority=NONE,
        stop_ids=read_only(np.full((1, rows), -1, np.int32)),
        requests_by_row=(None,) * rows,
        handles=(None,) * rows,
        first_pages=read_only(np.zeros((groups, rows), np.int32)),
        spans=read_only(np.zeros((groups, rows), np.int32)),
        # Descending, so that low pages go out first.
        free=tuple(
            (read_only(np.arange(count, 0, -1, dtype=np.int32)),) for count in limits.num_pages
        ),
        num_free=limits.num_pages,
        waiting=WaitingQueue(),
        index=limits.policy.new_index() if limits.policy else None,
        tokens=np.zeros((rows, columns * limits.page_size), np.int32),
        table=np.zeros((groups, rows, columns), np.int32),
        refs=tuple(np.zeros(count + 1, np.uint16) for count in limits.num_pages),
        users=NameTable(),
        adapters=NameTable(),
    )
