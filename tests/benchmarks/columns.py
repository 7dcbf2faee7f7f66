"""The least that a pure scheduler costs: counters in columns, copied on write, and nothing else.

No prefix index, no stop ids, no admission by memory. Its time on a machine is the measure of what
our step costs there.
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
    """What never changes."""

    max_batch_tokens: int
    page_size: int
    stop_token: int


@frozen(eq=False)
class State:
    """What is known between steps; `running` and `pages` are by row, the arrays are [rows] but for
    the free pages.
    """

    waiting: tuple[Request, ...]
    running: tuple[Request | None, ...]
    pages: tuple[Ints, ...]
    order: Ints
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
    """Intervals of positions to compute by row, and pages to write: (row, first column, page
    numbers).
    """

    rows: Ints
    starts: Ints
    stops: Ints
    new_pages: tuple[tuple[int, int, Ints], ...]


NONE = np.zeros(0, np.int32)


def initial(num_rows: int, num_pages: int) -> State:
    """Nothing running."""
    zeros = np.zeros(num_rows, np.int32)
    free = np.arange(num_pages, dtype=np.int32)
    return State((), (None,) * num_rows, (NONE,) * num_rows, zeros, zeros, zeros, zeros, free)


def step(state: State, events: Sequence[Event], limits: Limits) -> tuple[State, Plan]:
    """The state after the events, and what to run next."""
    state = functools.reduce(functools.partial(absorb, limits=limits), events, state)
    return schedule(admit(state), limits)


def absorb(state: State, event: Event, limits: Limits) -> State:
    """The state after one event."""
    match event:
        case Arrived(request):
            return evolve(state, waiting=(*state.waiting, request))
        case Sampled(rows, tokens):
            num_tokens = put(state.num_tokens, rows, state.num_tokens[rows] + 1)
            done = (tokens == limits.stop_token) | (num_tokens[rows] >= state.max_tokens[rows])
            return release(evolve(state, num_tokens=num_tokens), rows[done])


def release(state: State, rows: Ints) -> State:
    """The state without these rows' requests."""
    if not len(rows):
        return state
    gone = frozenset(rows.tolist())
    return evolve(
        state,
        running=tuple(None if i in gone else r for i, r in enumerate(state.running)),
        pages=tuple(NONE if i in gone else p for i, p in enumerate(state.pages)),
        num_tokens=put(state.num_tokens, rows, 0),
        num_computed=put(state.num_computed, rows, 0),
        free_pages=np.concatenate([state.free_pages, *(state.pages[i] for i in gone)]),
    )


def admit(state: State) -> State:
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
        order=put(state.order, rows, state.admitted + np.arange(len(rows))),
        num_tokens=put(state.num_tokens, rows, lengths),
        max_tokens=put(state.max_tokens, rows, lengths + [r.max_tokens for r in new]),
        admitted=state.admitted + len(rows),
    )


def schedule(state: State, limits: Limits) -> tuple[State, Plan]:
    """The oldest rows first, as far as tokens and pages last."""
    want = state.num_tokens - state.num_computed
    rows = np.flatnonzero(want)
    rows = rows[np.argsort(state.order[rows])]
    take = np.diff(np.minimum(np.cumsum(want[rows]), limits.max_batch_tokens), prepend=0)
    starts = state.num_computed[rows]
    stops = starts + take
    held = -(-starts // limits.page_size)
    need = -(-stops // limits.page_size) - held
    fits = (np.cumsum(need) <= len(state.free_pages)) & (take > 0)
    if len(rows) and not fits[0]:
        return schedule(preempt(state), limits)
    rows, starts, stops, held, need = (x[fits] for x in (rows, starts, stops, held, need))

    pages, new_pages, free = list(state.pages), [], state.free_pages
    for i in np.flatnonzero(need):
        row, fresh, free = int(rows[i]), free[: need[i]], free[need[i] :]
        pages[row] = np.concatenate([pages[row], fresh])
        new_pages.append((row, int(held[i]), fresh))
    state = evolve(
        state,
        num_computed=put(state.num_computed, rows, stops),
        pages=tuple(pages),
        free_pages=free,
    )
    return state, Plan(rows, starts, stops, tuple(new_pages))


def preempt(state: State) -> State:
    """The state without the pages of the youngest row that holds any; its tokens are computed again
    later.
    """
    holders = [i for i, pages in enumerate(state.pages) if len(pages)]
    row = max(holders, key=lambda i: state.order[i])
    return evolve(
        state,
        num_computed=put(state.num_computed, row, 0),
        pages=(*state.pages[:row], NONE, *state.pages[row + 1 :]),
        free_pages=np.concatenate([state.free_pages, state.pages[row]]),
    )


def put(column: Ints, rows: Ints | list[int] | int, values: Ints | int) -> Ints:
    """A copy of `column` with `values` at `rows`."""
    column = column.copy()
    column[rows] = values
    column.flags.writeable = False
    return column


def measure(rows: int, steps: int, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Seconds of each step in steady decode, pages of 16, ascending."""
    limits = Limits(max_batch_tokens=10**9, page_size=16, stop_token=-1)
    arrived = [Arrived(Request(str(i), (1,) * (1000 + i % 16), 10_000)) for i in range(rows)]
    state, plan = step(initial(rows, 200_000), arrived, limits)
    times = []
    for _ in range(steps):
        start = clock()
        state, plan = step(state, (Sampled(plan.rows, plan.rows + 1),), limits)
        times.append(clock() - start)
    return sorted(times)
