"""Whether a schedule makes progress: a scheduler may run nothing, or loop forever."""

from __future__ import annotations

from headstock.errors import format_count
from headstock.scheduler import State
from headstock.scheduler.selection import BLAME

_MAX_IDLE_STEPS = 10_000
"""Steps in a row that may run nothing while requests wait and no event or result is due; and how
many may pass without a token or an end, beside those that compute known tokens. None counts before
the time at which the scheduler asked to be asked again.
"""


class StallCheck:
    """Counts steps in which nothing runs, or that give no request a token."""

    def __init__(self, scheduler: str) -> None:
        self.scheduler = scheduler
        self.num_idle_steps = 0
        self.num_steps_without_token = 0
        self.next_ask = 0

    def find_stall(self, state: State, *, has_work: bool, is_idle: bool) -> str | None:
        """Count a step; return why the engine must end, or None.

        is_idle: nothing runs, and no event came
        """
        is_early, self.next_ask = state.milliseconds < self.next_ask, state.next_ask
        if is_idle and is_early and has_work:
            return None
        self.num_idle_steps = self.num_idle_steps + 1 if is_idle else 0
        if not has_work or state.accepted or state.ended:
            self.num_steps_without_token = 0
        else:
            self.num_steps_without_token += 1
        if not has_work:
            return None
        if self.num_idle_steps > _MAX_IDLE_STEPS:
            return f"the scheduler {self.scheduler!r} runs nothing, though requests wait; {BLAME}"
        if self.num_steps_without_token and self.num_steps_without_token % _MAX_IDLE_STEPS == 0:
            return self._find_livelock(state)
        return None

    def _find_livelock(self, state: State) -> str | None:
        """Report a livelock: the scheduler preempts requests before they produce a token."""
        # A step computes one token or more, and a preempted prompt is computed again.
        entries = [*state.waiting, *filter(None, state.requests_by_row)]
        num_tokens = sum(len(entry.tokens) for entry in entries)
        if self.num_steps_without_token < _MAX_IDLE_STEPS + 2 * num_tokens:
            return None
        return (
            f"the scheduler {self.scheduler!r} ran {self.num_steps_without_token} steps "
            f"without a token for any of {format_count(len(entries), 'request')}; {BLAME}"
        )
