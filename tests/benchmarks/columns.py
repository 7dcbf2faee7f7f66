"""The least that a pure scheduler costs: row counters, copied on write, and nothing else.

It has no prefix index, no stop ids and no admission by memory. What the real step costs on a
machine is compared with its time there.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import numpy as np
from attrs import evolve, field, frozen

from headstock.spi.arrays import Ints


@frozen
class Request:
    """A sequence to generate."""

    id: str
    prompt: tuple[int, ...] = field(repr=False)
    max_tokens: int


@frozen
class Limits:
    """The constants of a scheduler."""

    max_batch_tokens: int
    page_size: int
    stop_token: int


@frozen(eq=False)
class State:
    """The state between steps; `running` and `pages` are by row, arrays are [rows].

    free_pages: [free pages]
    """

    waiting: tuple[Request, ...]
    running: tuple[Request | None, ...]
    pages: tuple[Ints, ...]
    admission_ids: Ints
    num_tokens: Ints
    num_computed: Ints
    max_tokens: Ints
    free_pages: Ints
    admitted: int = 0


@frozen
class Arrived:
    """A new request."""

    request: Request


@frozen(eq=False)
class Sampled:
    """One token for each of the rows.   rows, tokens: [n]"""

    rows: Ints
    tokens: Ints


Event = Arrived | Sampled


@frozen(eq=False)
class Plan:
    """Positions to compute, by row, and new pages: (row, first column, page ids)."""

    rows: Ints
    starts: Ints
    stops: Ints
    new_pages: tuple[tuple[int, int, Ints], ...]


NONE = np.zeros(0, np.int32)


def make_state(num_rows: int, num_pages: int) -> State:
    """A state without requests."""
    zeros = np.zeros(num_rows, np.int32)
    free = np.arange(num_pages, dtype=np.int32)
    return State((), (None,) * num_rows, (NONE,) * num_rows, zeros, zeros, zeros, zeros, free)


def step(state: State, events: Sequence[Event], limits: Limits) -> tuple[State, Plan]:
    """The state after the events, and what to run next."""
    state = functools.reduce(functools.partial(apply_event, limits=limits), events, state)
    return make_plan(admit_waiting(state), limits)


def apply_event(state: State, event: Event, limits: Limits) -> State:
    """The state after one event."""
    match event:
        case Arrived(request):
            return evolve(state, waiting=(*state.waiting, request))
        case Sampled(rows, tokens):
            num_tokens = set_values(state.num_tokens, rows, state.num_tokens[rows] + 1)
            finished = (tokens == limits.stop_token) | (num_tokens[rows] >= state.max_tokens[rows])
            return free_rows(evolve(state, num_tokens=num_tokens), rows[finished])


def free_rows(state: State, rows: Ints) -> State:
    """The state without these rows' requests."""
    if not len(rows):
        return state
    freed_rows = frozenset(rows.tolist())
    return evolve(
        state,
        running=tuple(None if i in freed_rows else r for i, r in enumerate(state.running)),
        pages=tuple(NONE if i in freed_rows else p for i, p in enumerate(state.pages)),
        num_tokens=set_values(state.num_tokens, rows, 0),
        num_computed=set_values(state.num_computed, rows, 0),
        free_pages=np.concatenate([state.free_pages, *(state.pages[i] for i in freed_rows)]),
    )


def admit_waiting(state: State) -> State:
    """The state with waiting requests in free rows, first come, first served."""
    if not state.waiting:
        return state
    rows = [i for i, r in enumerate(state.running) if r is None][: len(state.waiting)]
    if not rows:
        return state
    new = state.waiting[: len(rows)]
    running = list(state.running)
    for row, request in zip(rows, new, strict=True):
        running[row] = request
    lengths = np.array([len(r.prompt) for r in new], np.int32)
    return evolve(
        state,
        waiting=state.waiting[len(rows) :],
        running=tuple(running),
        admission_ids=set_values(state.admission_ids, rows, state.admitted + np.arange(len(rows))),
        num_tokens=set_values(state.num_tokens, rows, lengths),
        max_tokens=set_values(state.max_tokens, rows, lengths + [r.max_tokens for r in new]),
        admitted=state.admitted + len(rows),
    )


def make_plan(state: State, limits: Limits) -> tuple[State, Plan]:
    """The state after a step, and its plan: oldest rows first, while tokens and pages last."""
    want = state.num_tokens - state.num_computed
    rows = np.flatnonzero(want)
    rows = rows[np.argsort(state.admission_ids[rows])]
    take = np.diff(np.minimum(np.cumsum(want[rows]), limits.max_batch_tokens), prepend=0)
    starts = state.num_computed[rows]
    stops = starts + take
    num_held = -(-starts // limits.page_size)
    need = -(-stops // limits.page_size) - num_held
    fits = (np.cumsum(need) <= len(state.free_pages)) & (take > 0)
    if len(rows) and not fits[0]:
        return make_plan(preempt_youngest(state), limits)
    rows, starts, stops, num_held, need = (x[fits] for x in (rows, starts, stops, num_held, need))

    pages, new_pages, free = list(state.pages), [], state.free_pages
    for i in np.flatnonzero(need):
        row, fresh, free = int(rows[i]), free[: need[i]], free[need[i] :]
        pages[row] = np.concatenate([pages[row], fresh])
        new_pages.append((row, int(num_held[i]), fresh))
    state = evolve(
        state,
        num_computed=set_values(state.num_computed, rows, stops),
        pages=tuple(pages),
        free_pages=free,
    )
    return state, Plan(rows, starts, stops, tuple(new_pages))


def preempt_youngest(state: State) -> State:
    """The state without the pages of the youngest row that holds any; its tokens are computed again
    later.
    """
    holders = [i for i, pages in enumerate(state.pages) if len(pages)]
    row = max(holders, key=lambda i: state.admission_ids[i])
    return evolve(
        state,
        num_computed=set_values(state.num_computed, row, 0),
        pages=(*state.pages[:row], NONE, *state.pages[row + 1 :]),
        free_pages=np.concatenate([state.free_pages, state.pages[row]]),
    )


def set_values(column: Ints, rows: Ints | list[int] | int, values: Ints | int) -> Ints:
    """A copy of `column` with `values` at `rows`."""
    column = column.copy()
    column[rows] = values
    column.flags.writeable = False
    return column


def measure_steps(
    rows: int, steps: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Seconds of each step in steady decode, pages of 16, ascending."""
    limits = Limits(max_batch_tokens=10**9, page_size=16, stop_token=-1)
    arrived = [Arrived(Request(str(i), (1,) * (1000 + i % 16), 10_000)) for i in range(rows)]
    state, plan = step(make_state(rows, 200_000), arrived, limits)
    times = []
    for _ in range(steps):
        start = clock()
        state, plan = step(state, (Sampled(plan.rows, plan.rows + 1),), limits)
        times.append(clock() - start)
    return sorted(times)
