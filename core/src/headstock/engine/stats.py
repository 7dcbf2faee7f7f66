"""Counts of an engine, since its start and at the moment."""

from __future__ import annotations

import numpy as np
from attrs import frozen

from headstock.engine.output_tracker import Ledger
from headstock.scheduler import Limits, State


@frozen(kw_only=True)
class EngineStats:
    """Counts since the start, and what is the case now."""

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


def count(state: State, limits: Limits, ledger: Ledger) -> EngineStats:
    """The counts of an engine in this state."""
    total, free = limits.num_pages[0], state.num_free[0]
    held = int(np.count_nonzero(state.refs[0]))
    return EngineStats(
        running=state.num_running,
        waiting=len(state.waiting),
        steps=state.num_steps,
        preemptions=state.num_preempted,
        free_pages=free,
        cached_pages=total - free - held,
        total_pages=total,
        prompt_tokens=ledger.prompt_tokens,
        cached_tokens=ledger.cached_tokens,
        output_tokens=ledger.output_tokens,
        failed=ledger.failed,
        peak_held_pages=ledger.peak_held_pages,
    )
