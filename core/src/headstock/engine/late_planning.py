"""When the next step is planned: as late as the device allows, so that arrivals are in it.

With overlap a step is planned and launched while the one before runs. Planned at its beginning, a
request that arrives later waits for all of that step and for the whole next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from attrs import evolve, frozen

from headstock.engine.step_clock import StepClock
from headstock.scheduler import Plan

_NUM_STEPS = 8
_NUM_LEADS = 16
_LEAST_SEEN = 4
"""Steps and launches that are timed before anything waits."""
_SURE = 0.95
"""The share of the shortest of the last steps that the present one is trusted to take."""
_SURE_OF_PROMPTS = 0.8
"""The same of what prompt tokens add."""
_LEADS = 1.25
"""How many times the longest of the last leads is left for planning and launching."""
_MARGIN = 0.0005
"""Seconds left besides: a thread wakes up late."""
_LEAST_WAITED = 0.0002
"""Seconds that the host waits for the result of a step that is timed.

Where the result is there already, the step ended earlier, and the host cannot tell when. Times of
such steps held the wait before them, so that each wait made the next one longer.
"""
_LEAST_DELAY = 0.0005
"""Seconds that are worth a sleep."""


@frozen(kw_only=True)
class HostTimes:
    """What was seen of the last steps, in seconds.

    steps: how long those took the device in which rows decode alone
    by_token: how much longer steps with prompts took for each of these tokens
    leads: from the beginning of planning until all of the plan is launched
    """

    steps: tuple[float, ...] = ()
    by_token: tuple[float, ...] = ()
    leads: tuple[float, ...] = ()

    def add_step(self, seconds: float, prompt_tokens: int = 0) -> HostTimes:
        """The times with one more step in which rows decode."""
        if not prompt_tokens:
            return evolve(self, steps=(*self.steps, seconds)[-_NUM_STEPS:])
        more = max(seconds - min(self.steps, default=seconds), 0.0) / prompt_tokens
        return evolve(self, by_token=(*self.by_token, more)[-_NUM_STEPS:])

    def add_lead(self, seconds: float) -> HostTimes:
        """The times with one more launch."""
        return evolve(self, leads=(*self.leads, seconds)[-_NUM_LEADS:])


def choose_delay(times: HostTimes, running: float, prompt_tokens: int = 0) -> float:
    """Seconds for which planning may wait while the device runs a step since `running` seconds.

    prompt_tokens: of that step, beside rows that decode
    returns: 0 where too little was seen, or the wait would be too short.
    """
    if min(len(times.steps), len(times.leads)) < _LEAST_SEEN:
        return 0.0
    # Behind prompts too only where steps without them are long enough, by a usual launch. On a slow
    # host 0.6B had its slowest first tokens after 32 to 71 ms with such waits, 20 to 35 without.
    alone = _SURE * min(times.steps) - _MARGIN
    if alone - _LEADS * median(times.leads) < _LEAST_DELAY:
        return 0.0
    delay = alone - _LEADS * max(times.leads) - running
    if len(times.by_token) >= _LEAST_SEEN:
        delay += _SURE_OF_PROMPTS * min(times.by_token) * prompt_tokens
    return delay if delay >= _LEAST_DELAY else 0.0


class LatePlanner:
    """Times launches, and waits before a step is planned."""

    def __init__(
        self,
        step_clock: StepClock,
        *,
        enabled: bool,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.step_clock, self.enabled, self.sleep = step_clock, enabled, sleep
        self.times = HostTimes()
        self.planned_at: float | None = None
        self.has_slept = False

    def note_launched(self) -> None:
        """All of a step is launched."""
        if self.planned_at is not None:
            lead, self.planned_at = self.step_clock.now() - self.planned_at, None
            self.times = self.times.add_lead(lead)

    def note_end(self, plan: Plan, seconds: float, waited: float) -> None:
        """The oldest step in flight has ended.

        seconds: that it took
        waited: seconds that the host waited for it
        """
        if not self.enabled:
            return
        has_slept, self.has_slept = self.has_slept, False
        if waited < _LEAST_WAITED:
            if has_slept:  # for too long: the observation is outdated
                self.times = HostTimes(leads=self.times.leads)
        elif plan.num_decode:
            self.times = self.times.add_step(seconds, _count_prompt_tokens(plan))

    def wait(self, running: Plan | None, *, is_urgent: bool) -> None:
        """Wait as long as the device surely works on `running`, the step in flight.

        is_urgent: the plan must not wait; something would be told only after it, or requests wait
        """
        if not self.enabled:
            return
        if running is not None and running.num_decode and not is_urgent:
            since = self.step_clock.measure_running()
            delay = choose_delay(self.times, since, _count_prompt_tokens(running))
            if delay:
                self.sleep(delay)
                self.has_slept = True
        self.planned_at = self.step_clock.now()


def _count_prompt_tokens(plan: Plan) -> int:
    """Tokens of the plan's rows that do not decode."""
    prompts = slice(plan.num_decode, None)
    return int((plan.stops[prompts] - plan.starts[prompts]).sum())
