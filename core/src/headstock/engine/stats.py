"""Counts of an engine."""

from __future__ import annotations

import numpy as np
from attrs import frozen

from headstock.engine.output_tracker import OutputTracker
from headstock.scheduler import Limits, State


@frozen(kw_only=True)
class EngineStats:
    """Counts since the start, and the present state.

    running, waiting: requests now
    free_pages, cached_pages, total_pages: of all KV groups together, now; cached ones are held by
        the prefix index alone
    peak_held_pages: the most that requests held at once, in all KV groups together, since the start
        or the last reset of the prefix cache
    """

    running: int
    waiting: int
    steps: int
    preemptions: int
    free_pages: int
    cached_pages: int
    total_pages: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    failed: int
    peak_held_pages: int


def collect_stats(state: State, limits: Limits, output_tracker: OutputTracker) -> EngineStats:
    """Collect the counts of an engine in this state."""
    total, free = sum(limits.num_pages), sum(state.num_free)
    num_held = sum(int(np.count_nonzero(refs)) for refs in state.refs)
    return EngineStats(
        running=state.num_running,
        waiting=len(state.waiting),
        steps=state.num_steps,
        preemptions=state.num_preempted,
        free_pages=free,
        cached_pages=total - free - num_held,
        total_pages=total,
        prompt_tokens=output_tracker.prompt_tokens,
        cached_tokens=output_tracker.cached_tokens,
        output_tokens=output_tracker.output_tokens,
        failed=output_tracker.failed,
        peak_held_pages=output_tracker.peak_held_pages,
    )
