"""The cost of an arrival while 4,096 requests wait: for a row, or for a prefix that another request
computes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
from attrs import evolve
from benchmarks.running import ROWS, make_limits, make_request, sample_tokens

from headstock.scheduler import (
    Aborted,
    Arrived,
    Event,
    Plan,
    Request,
    State,
    initial_state,
    step,
)
from headstock.spi import Budget, ScheduleDecision, View

WAITING = 4096
CHUNK = 16
"""Tokens of the shared prompt that a step computes."""
PROMPT_TOKENS = 6000


def schedule_chunks(view: View, budget: Budget) -> ScheduleDecision:
    """Run a chunk of every row in every step, so that tokens are left for waiting requests."""
    rows = view.num_new_tokens.nonzero()[0]
    counts = np.minimum(view.num_new_tokens.take(rows), CHUNK)
    return ScheduleDecision(
        rows=rows, counts=counts, admit=np.arange(len(view.waiting_lengths), dtype=np.int32)
    )


def fill_rows(rng: np.random.Generator) -> tuple[State, Plan]:
    """A scheduler whose rows are all taken, with requests that wait for one."""
    limits = make_limits(64, ROWS)
    events = [Arrived(make_request(i, rng, 7000)) for i in range(ROWS + WAITING)]
    state = initial_state(limits)
    return state, step(state, events)


def share_prompt(rng: np.random.Generator, waiting: int = WAITING) -> tuple[State, Plan]:
    """A scheduler with free rows, and requests that wait for the prefix of one prompt.

    A quarter of the rows is free; the prompt is computed in chunks.
    """
    limits = make_limits(64, ROWS)
    rows = ROWS * 3 // 4 - 1
    state = initial_state(limits)
    plan = step(state, [Arrived(make_request(i, rng, 7000)) for i in range(rows)])
    prompt = rng.integers(10, 50_000, PROMPT_TOKENS).astype(np.int32)
    events: list[Event] = [sample_tokens(state, plan, None, rng)]
    events += [
        Arrived(Request(id=f"like {i}", prompt=prompt, max_tokens=10)) for i in range(waiting + 1)
    ]
    # the first of them is admitted with a chunk of its prompt, before the others come
    state.limits = evolve(limits, max_batch_tokens=rows + CHUNK)
    plan = step(state, events[:2])
    state.limits = evolve(limits, schedule=schedule_chunks)
    return state, step(state, [sample_tokens(state, plan, None, rng), *events[2:]])


def time_steps(
    state: State, plan: Plan, rng: np.random.Generator, count: int
) -> Iterator[list[float]]:
    """Seconds of a step without an arrival, and of the next step, with one.

    A third step aborts the new request, so that as many wait as before.
    """
    queued, prompt = len(state.waiting), rng.integers(10, 50_000, 1000).astype(np.int32)
    for number in range(count):
        request_id, times = f"new {number}", []
        new_request = Request(id=request_id, prompt=prompt, max_tokens=10)
        for extra in ([], [Arrived(new_request)], [Aborted(request_id)]):
            events = [sample_tokens(state, plan, None, rng), *extra]
            start = time.perf_counter()
            plan = step(state, events)
            times.append(time.perf_counter() - start)
        assert len(state.waiting) == queued, "internal error: the request was admitted"
        yield times[:2]


def measure_arrivals(steps: int, *, same_prompt: bool) -> tuple[list[float], list[float]]:
    """Seconds that an arrival adds to a step, and seconds of steps without one, each ascending."""
    rng = np.random.default_rng(0)
    max_steps = PROMPT_TOKENS // CHUNK // 3 - 10 if same_prompt else steps
    pairs: list[list[float]] = []
    while len(pairs) < steps:
        setup = share_prompt(rng) if same_prompt else fill_rows(rng)
        pairs += list(time_steps(*setup, rng, min(max_steps, steps - len(pairs) + 5)))[5:]
    return sorted(b - a for a, b in pairs), sorted(a for a, _ in pairs)
