"""The draft that a step turns one state into the next with."""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import define, field

from headstock.scheduler.contiguous import Region
from headstock.scheduler.events import Ended
from headstock.scheduler.limits import Limits
from headstock.scheduler.request import Entry
from headstock.scheduler.row_counters import Column
from headstock.scheduler.state import NOTHING, Accepted, State, Write
from headstock.scheduler.waiting_queue import Queue

Ints = np.ndarray


@define(eq=False)
class Draft:
    """A state in the making: the step's own copies, which it may write, and the owned values. What
    is not copied here is copied before its first write.
    """

    limits: Limits
    old: State
    columns: Ints
    ranked: Ints
    stop_ids: Ints
    seats: list[Entry | None]
    handles: list[Any]
    first_pages: Ints
    spans: Ints
    free: list[list[Ints]]
    num_free: list[int]
    waiting: Queue
    index: Any
    tokens: Ints
    table: Ints
    refs: tuple[np.ndarray, ...]
    num_admitted: int
    num_arrived: int
    num_preempted: int
    num_special: int
    regions: tuple[Region, ...]
    writes: list[Write]
    ended: list[Ended] = field(factory=list)
    accepted: list[Accepted] = field(factory=list)
    joined: list[int] = field(factory=list)
    reseated: bool = False  # rows joined, so `ranked` lacks them


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
        state.first_pages,
        state.spans.copy(),
        [list(stack) for stack in state.free],
        list(state.num_free),
        state.waiting,
        state.index,
        state.tokens,
        state.table,
        state.refs,
        state.num_admitted,
        state.num_arrived,
        state.num_preempted,
        state.num_special,
        state.regions,
        list(state.writes),
    )


def seal(draft: Draft) -> State:
    """The state that the draft became."""
    for array in (draft.columns, draft.ranked, draft.stop_ids, draft.first_pages, draft.spans):
        array.setflags(write=False)
    return State(
        columns=draft.columns,
        ranked=draft.ranked,
        stop_ids=draft.stop_ids,
        seats=tuple(draft.seats),
        handles=tuple(draft.handles),
        first_pages=draft.first_pages,
        spans=draft.spans,
        free=tuple([tuple(stack) for stack in draft.free]),
        num_free=tuple(draft.num_free),
        waiting=draft.waiting,
        index=draft.index,
        tokens=draft.tokens,
        table=draft.table,
        refs=draft.refs,
        regions=draft.regions,
        writes=tuple(draft.writes),
        ended=tuple(draft.ended),
        accepted=joined_up(draft.accepted),
        num_admitted=draft.num_admitted,
        num_arrived=draft.num_arrived,
        num_steps=draft.old.num_steps + 1,
        num_preempted=draft.num_preempted,
        num_special=draft.num_special,
    )


def joined_up(parts: list[Accepted]) -> Accepted:
    """What several events accepted, as one."""
    if len(parts) < 2:
        return parts[0] if parts else NOTHING
    return Accepted(
        np.concatenate([part.orders for part in parts]),
        np.concatenate([part.counts for part in parts]),
        np.concatenate([part.tokens for part in parts]),
    )


def shareable(draft: Draft) -> Ints:
    """How many tokens of each row may be shared or kept: known ones, computed by steps known to be
    done.

    Under overlap the plan made last still runs, and may fail.   returns: [rows] int32
    """
    columns = draft.columns
    done: Ints = np.minimum(columns[Column.NUM_COMPUTED], columns[Column.NUM_KNOWN])
    return np.minimum(done, columns[Column.BEFORE]) if draft.limits.overlap else done
