"""What a request costs that comes while 4,096 wait, for a seat or for a prefix that another one is
computing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
from attrs import evolve
from benchmarks.running import ROWS, limits, request, sampled

from headstock.scheduler import Aborted, Arrived, Event, Limits, Plan, Request, State, initial, step
from headstock.spi import Budget, ScheduleDecision, View

WAITING = 4096
CHUNK = 16
"""Tokens of the long prompt that a step computes."""
LONG = 6000


def by_chunks(view: View, budget: Budget) -> ScheduleDecision:
    """Everyone in every step, but no more than a chunk of each: there are tokens left for those who
    wait.
    """
    rows = view.num_new_tokens.nonzero()[0]
    counts = np.minimum(view.num_new_tokens.take(rows), CHUNK)
    return ScheduleDecision(
        rows=rows, counts=counts, admit=np.arange(len(view.waiting_lengths), dtype=np.int32)
    )


def crowded(rng: np.random.Generator) -> tuple[Limits, State, Plan]:
    """Every seat taken, others waiting."""
    bounds = limits(64, ROWS)
    events = [Arrived(request(i, rng, 7000)) for i in range(ROWS + WAITING)]
    return bounds, *step(initial(bounds), events, bounds)


def siblings(rng: np.random.Generator, waiting: int = WAITING) -> tuple[Limits, State, Plan]:
    """A quarter of the seats free, and one prompt being computed in chunks that those who wait
    begin with.
    """
    bounds = limits(64, ROWS)
    rows = ROWS * 3 // 4 - 1
    state, plan = step(
        initial(bounds), [Arrived(request(i, rng, 7000)) for i in range(rows)], bounds
    )
    prompt = rng.integers(10, 50_000, LONG).astype(np.int32)
    events: list[Event] = [sampled(state, plan, None, rng)]
    events += [
        Arrived(Request(id=f"like {i}", prompt=prompt, max_tokens=10)) for i in range(waiting + 1)
    ]
    # The first of them takes a seat with a chunk of its prompt; then the others come.
    state, plan = step(state, events[:2], evolve(bounds, max_batch_tokens=rows + CHUNK))
    bounds = evolve(bounds, schedule=by_chunks)
    return bounds, *step(state, [sampled(state, plan, None, rng), *events[2:]], bounds)


def turns(
    bounds: Limits, state: State, plan: Plan, rng: np.random.Generator, count: int
) -> Iterator[list[float]]:
    """Seconds of a step without an arrival and of the next one, with; the newcomer is gone again
    after a third.
    """
    queued, prompt = len(state.waiting), rng.integers(10, 50_000, 1000).astype(np.int32)
    for number in range(count):
        id, times = f"new {number}", []
        newcomer = Request(id=id, prompt=prompt, max_tokens=10)
        for extra in ([], [Arrived(newcomer)], [Aborted(id)]):
            events = [sampled(state, plan, None, rng), *extra]
            start = time.perf_counter()
            state, plan = step(state, events, bounds)
            times.append(time.perf_counter() - start)
        assert len(state.waiting) == queued, "somebody was seated"
        yield times[:2]


def measure(steps: int, *, alike: bool) -> tuple[list[float], list[float]]:
    """Seconds that an arrival adds to a step, and seconds of steps without one, each ascending."""
    rng = np.random.default_rng(0)
    most = LONG // CHUNK // 3 - 10 if alike else steps
    pairs: list[list[float]] = []
    while len(pairs) < steps:
        made = siblings(rng) if alike else crowded(rng)
        pairs += list(turns(*made, rng, min(most, steps - len(pairs) + 5)))[5:]
    return sorted(b - a for a, b in pairs), sorted(a for a, _ in pairs)
