"""Counts of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve, frozen

from headstock.errors import format_count
from headstock.scheduler import Limits, State

if TYPE_CHECKING:  # a server's own process has counts and no torch
    from headstock.engine.drafting import DraftCounts
    from headstock.engine.output_tracker import OutputTracker


@frozen(kw_only=True)
class EngineStats:
    """Counts since the start, and the present state.

    running, waiting: requests now
    failed: requests whose step failed; not_finite of them had logits that are not finite
    free_pages, cached_pages, total_pages: of all KV groups together, now; cached ones are held by
        the prefix index alone
    steps: of the scheduler; executed_steps of them had work for the device, and replayed_steps of
        those replayed a graph
    draft_tokens, accepted_draft_tokens: drafts of a proposer that were verified, and the right ones
    verify_steps, replayed_verify_steps: steps that verified drafts, and those that replayed a graph
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
    not_finite: int = 0
    executed_steps: int = 0
    replayed_steps: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    verify_steps: int = 0
    replayed_verify_steps: int = 0

    def since(self, earlier: EngineStats) -> EngineStats:
        """Return the state with the drafts and the steps that verified them since `earlier`."""
        names = ("draft_tokens", "accepted_draft_tokens", "verify_steps", "replayed_verify_steps")
        return evolve(
            self, **{name: getattr(self, name) - getattr(earlier, name) for name in names}
        )

    @property
    def draft_line(self) -> str:
        """What came of drafts, in a line; empty where none was verified."""
        if not self.draft_tokens:
            return ""
        share = self.accepted_draft_tokens / self.draft_tokens
        return (
            f"{self.accepted_draft_tokens} of {format_count(self.draft_tokens, 'draft')} right "
            f"({share:.0%}) in {format_count(self.verify_steps, 'step')}, "
            f"{self.replayed_verify_steps} replayed"
        )


def collect_stats(
    state: State,
    limits: Limits,
    output_tracker: OutputTracker,
    drafts: DraftCounts | None = None,
) -> EngineStats:
    """Collect the counts of an engine in this state; without a proposer `drafts` is None."""
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
        not_finite=output_tracker.not_finite,
        peak_held_pages=output_tracker.peak_held_pages,
        executed_steps=output_tracker.executed_steps,
        replayed_steps=output_tracker.replayed_steps,
        draft_tokens=0 if drafts is None else drafts.proposed,
        accepted_draft_tokens=0 if drafts is None else drafts.accepted,
        verify_steps=0 if drafts is None else drafts.steps,
        replayed_verify_steps=0 if drafts is None else drafts.replayed_steps,
    )
