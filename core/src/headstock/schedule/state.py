"""All that the scheduler knows, and the draft that a step turns it into the next with."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from attrs import define, field, frozen

from headstock.schedule.events import Ended
from headstock.schedule.limits import Limits
from headstock.schedule.regions import Region
from headstock.schedule.request import Entry

Ints = np.ndarray


class Column(IntEnum):
    """The per-row counters; a free row has zeros."""

    ACTIVE = 0  # 1 while the seat is taken
    ORDER = 1  # admission number, counted from 1
    NUM_TOKENS = 2  # known, promised and drafted tokens
    NUM_KNOWN = 3  # tokens in the token table
    NUM_COMPUTED = 4  # tokens whose keys and values are in the pool, or will be once launched steps are done
    PROMISED = 5  # tokens that launched steps will sample
    NUM_PROMPT = 6  # length of the prompt
    MAX_LEN = 7  # length at which the row ends
    MIN_LEN = 8  # length before which no stop id counts
    INDEXED = 9  # leading pages that the prefix index holds
    LAST_RUN = 10  # number of the step that the row last ran in, or was seated in
    FENCED = 11  # 1: wait for promised tokens before planning on
    SCORED = 12  # 1: every prompt position is scored
    CACHED = 13  # prompt tokens taken from the index
    PRIORITY = 14  # the request's; higher goes first
    ARRIVAL = 15  # number of the request in the order they came
    BEFORE = 16  # tokens computed before the plan that was made last


@frozen(eq=False)
class Accepted:
    """Output tokens that became known, ragged: the row admitted as `orders[i]` got `counts[i]` of `tokens`.

    orders, counts: [n] int32    tokens: [sum of counts] int32
    """

    orders: Ints
    counts: Ints
    tokens: Ints


NO_PAGES: Ints = np.zeros(0, np.int32)
NO_PAGES.flags.writeable = False
NOTHING = Accepted(NO_PAGES, NO_PAGES, NO_PAGES)


Write = tuple[int, Ints, Ints, Ints]
"""Entries of a page table: the group, and rows, columns and pages, each [n]."""


@frozen(kw_only=True, eq=False)
class State:
    """The scheduler's knowledge between two steps. Its arrays are read-only.

    columns: [columns, rows] int32, counters by `Column`      ranked: [active] int32, taken seats in rank order
    stop_ids: [width, rows] int32, padded with -1             seats, handles: by row, None where free or not shared
    pages: by group and row, [n] int32, the live pages
    first_pages, spans: [groups, rows] int32, page table columns that are behind the window, and that were ever filled
    refs: by group, [pages + 1] uint16, rows that hold each page
    free: by group, a stack of [n] int32, taken from its end; `num_free` counts them    waiting: in rank order
    `regions` of ended sequences, oldest first, that may be taken over. `writes` are page table entries that no plan has
    carried yet; `ended` and `accepted` tell what the events of the last step came to.
    Owned values, handed from state to state and written in place: `index` (by the cache policy), `tokens` [rows,
    max_len] int32.
    """

    columns: Ints
    ranked: Ints
    stop_ids: Ints
    seats: tuple[Entry | None, ...]
    handles: tuple[Any, ...]
    pages: tuple[tuple[Ints, ...], ...]
    first_pages: Ints
    spans: Ints
    refs: tuple[np.ndarray, ...]
    free: tuple[tuple[Ints, ...], ...]
    num_free: tuple[int, ...]
    waiting: tuple[Entry, ...]
    index: Any
    tokens: Ints
    regions: tuple[Region, ...] = ()
    writes: tuple[Write, ...] = ()
    ended: tuple[Ended, ...] = ()
    accepted: Accepted = NOTHING
    num_admitted: int = 0
    num_arrived: int = 0
    num_steps: int = 0
    num_preempted: int = 0

    @property
    def num_running(self) -> int:
        """Taken seats."""
        return len(self.ranked)


def initial(limits: Limits) -> State:
    """Nothing running, every page free."""
    rows, groups = limits.max_rows, len(limits.groups)
    return State(
        columns=sealed(np.zeros((len(Column), rows), np.int32)),
        ranked=NO_PAGES,
        stop_ids=sealed(np.full((1, rows), -1, np.int32)),
        seats=(None,) * rows,
        handles=(None,) * rows,
        pages=((NO_PAGES,) * rows,) * groups,
        first_pages=sealed(np.zeros((groups, rows), np.int32)),
        spans=sealed(np.zeros((groups, rows), np.int32)),
        refs=tuple(sealed(np.zeros(count + 1, np.uint16)) for count in limits.num_pages),
        # Descending, so that low pages go out first.
        free=tuple((sealed(np.arange(count, 0, -1, dtype=np.int32)),) for count in limits.num_pages),
        num_free=limits.num_pages,
        waiting=(),
        index=limits.policy.new() if limits.policy else None,
        tokens=np.zeros((rows, limits.max_len), np.int32),
    )


def sealed(array: np.ndarray) -> np.ndarray:
    """The array, no longer writeable."""
    array.flags.writeable = False
    return array


@define(eq=False)
class Draft:
    """A state in the making: the step's own copies, which it may write. What is not copied here is copied before its
    first write.
    """

    limits: Limits
    old: State
    columns: Ints
    ranked: Ints
    stop_ids: Ints
    seats: list[Entry | None]
    handles: list[Any]
    pages: list[list[Ints]]
    first_pages: Ints
    spans: Ints
    refs: list[np.ndarray]
    free: list[list[Ints]]
    num_free: list[int]
    waiting: tuple[Entry, ...]
    index: Any
    tokens: Ints
    num_admitted: int
    num_arrived: int
    num_preempted: int
    regions: tuple[Region, ...]
    ended: list[Ended] = field(factory=list)
    accepted: list[Accepted] = field(factory=list)
    writes: list[Write] = field(factory=list)
    joined: list[int] = field(factory=list)
    reseated: bool = False  # rows joined or left, so `ranked` is stale


def draft_of(state: State, limits: Limits) -> Draft:
    """A draft that starts as `state`."""
    return Draft(
        limits,
        state,
        state.columns.copy(),
        state.ranked,
        state.stop_ids,
        list(state.seats),
        list(state.handles),
        [list(rows) for rows in state.pages],
        state.first_pages,
        state.spans.copy(),
        list(state.refs),
        [list(stack) for stack in state.free],
        list(state.num_free),
        state.waiting,
        state.index,
        state.tokens,
        state.num_admitted,
        state.num_arrived,
        state.num_preempted,
        state.regions,
        writes=list(state.writes),
    )


def seal(draft: Draft) -> State:
    """The state that the draft became."""
    draft.columns.flags.writeable = False
    for array in (*draft.refs, draft.ranked, draft.stop_ids, draft.first_pages, draft.spans):
        array.flags.writeable = False
    return State(
        columns=draft.columns,
        ranked=draft.ranked,
        stop_ids=draft.stop_ids,
        seats=tuple(draft.seats),
        handles=tuple(draft.handles),
        pages=tuple([tuple(rows) for rows in draft.pages]),
        first_pages=draft.first_pages,
        spans=draft.spans,
        refs=tuple(draft.refs),
        free=tuple([tuple(stack) for stack in draft.free]),
        num_free=tuple(draft.num_free),
        waiting=draft.waiting,
        index=draft.index,
        tokens=draft.tokens,
        regions=draft.regions,
        writes=tuple(draft.writes),
        ended=tuple(draft.ended),
        accepted=joined_up(draft.accepted),
        num_admitted=draft.num_admitted,
        num_arrived=draft.num_arrived,
        num_steps=draft.old.num_steps + 1,
        num_preempted=draft.num_preempted,
    )


def writeable(array: np.ndarray) -> np.ndarray:
    """The array itself when it may be written, else a copy."""
    return array if array.flags.writeable else array.copy()


def joined_up(parts: list[Accepted]) -> Accepted:
    """What several events accepted, as one."""
    if len(parts) < 2:
        return parts[0] if parts else NOTHING
    return Accepted(
        np.concatenate([part.orders for part in parts]),
        np.concatenate([part.counts for part in parts]),
        np.concatenate([part.tokens for part in parts]),
    )


def some(mask: np.ndarray) -> bool:
    """Whether any entry of the mask is set; five times as fast as `mask.any()` at these sizes."""
    return bool(np.count_nonzero(mask))


def every(mask: np.ndarray) -> bool:
    """Whether all entries of the mask are set."""
    return int(np.count_nonzero(mask)) == mask.size
