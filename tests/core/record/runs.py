"""Runs of the scheduler alone, recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from toy_workloads import limits as small_limits

from headstock.config import EngineConfig
from headstock.record.header import make_header
from headstock.record.recorder import Recorder
from headstock.scheduler import (
    Arrived,
    Event,
    Limits,
    Plan,
    Request,
    Sampled,
    State,
    initial_state,
    step,
)

VOCAB = 1000
STOPS = (7, 8)


def make_run_header(limits: Limits) -> dict[str, Any]:
    """The header of the engine that these limits would be of."""
    cache = "radix" if limits.policy is not None else "naive"
    return make_header(EngineConfig(cache_type=cache, scheduler=limits.scheduler), limits)


def make_recorder(limits: Limits, path: Path | None, *, prompts: bool = False) -> Recorder:
    """A recorder of an engine of these limits."""
    return Recorder(
        make_run_header(limits), limits, None if path is None else str(path), prompts=prompts
    )


def make_run_limits(**changes: Any) -> Limits:
    """An engine of 64 rows and 300 pages."""
    sizes = {
        "max_rows": 64,
        "num_pages": 300,
        "page_size": 8,
        "max_batch_tokens": 256,
        "max_len": 400,
        "check": False,
    }
    return small_limits(**(sizes | changes))


def make_requests(count: int, seed: int = 0) -> list[Request]:
    """Requests in families that share long beginnings, as chats with a system prompt and turns
    do.
    """
    rng = np.random.default_rng(seed)
    systems = [rng.integers(10, VOCAB, 16 * (2 + family)) for family in range(5)]
    turns: list[np.ndarray] = list(systems)
    made = []
    for number in range(count):
        start = (
            turns[int(rng.integers(0, len(turns)))]
            if rng.random() < 0.5
            else systems[int(rng.integers(0, 5))]
        )
        prompt = np.concatenate([start, rng.integers(10, VOCAB, int(rng.integers(4, 60)))])[
            :250
        ].astype(np.int32)
        turns = [*turns[-40:], prompt]
        made.append(
            Request(
                id=f"request {number}",
                prompt=prompt,
                max_tokens=int(rng.integers(4, 80)),
                stop_ids=STOPS,
                user=f"user {number % 3}",
            )
        )
    return made


def run_steps(
    limits: Limits, arrivals: list[Request], most: int, seed: int = 1
) -> Iterator[tuple[list[Event], State, Plan]]:
    """Steps with random tokens, requests coming in bursts, until all are done or there were `most`
    steps.
    """
    rng, state, waiting = np.random.default_rng(seed), initial_state(limits), list(arrivals)
    events: list[Event] = []
    for number in range(most):
        burst = int(rng.integers(0, 12)) if number % 300 < 150 and rng.random() < 0.15 else 0
        events += [Arrived(waiting.pop()) for _ in range(min(burst, len(waiting)))]
        plan = step(state, tuple(events))
        yield events, state, plan
        if not waiting and not state.num_running and not state.waiting:
            return
        sampled = plan.samples > 0
        tokens = rng.integers(0, VOCAB, int(sampled.sum())).astype(np.int32)
        events = (
            [Sampled(plan.rows[sampled], plan.admission_ids[sampled], None, tokens)]
            if len(tokens)
            else []
        )


def record_run(
    path: Path, limits: Limits, arrivals: list[Request], most: int, *, prompts: bool = False
) -> int:
    """Record a run to its end; how many steps it had."""
    recorder = make_recorder(limits, path, prompts=prompts)
    count = 0
    for events, state, plan in run_steps(limits, arrivals, most):
        recorder.record_step(events, state, plan)
        count += 1
    recorder.close()
    return count
