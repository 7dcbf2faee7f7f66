"""A scheduler that admits requests in batches: the oldest one waits for a window of time."""

from __future__ import annotations

from attrs import evolve, field, frozen

from headstock.builtin import mixed
from headstock.spi import Budget, ScheduleDecision, ScheduleFunction, SchedulerSpec, SpiRange, View
from headstock.spi.scheduler import no_rows

WINDOW_MS = 200


def spec() -> SchedulerSpec:
    """The scheduler `windowed`."""
    return SchedulerSpec(
        name="windowed",
        spi=SpiRange(0, 3),
        summary="admits requests in batches",
        implementation="windowed:make_schedule",
        options="windowed:Options",
    )


@frozen(kw_only=True)
class Options:
    """window_ms: from the first request of a batch to its admission; least: requests that end it"""

    window_ms: int = WINDOW_MS
    least: int = field(default=1_000)


def make_schedule(options: Options) -> ScheduleFunction:
    """The scheduler of these options."""

    def schedule(view: View, budget: Budget) -> ScheduleDecision:
        decision = mixed.schedule(view, budget)
        waits = view.list_waiting().waits
        if not len(waits) or len(waits) >= options.least:
            return decision
        left = options.window_ms - int(waits.max())
        if left <= 0:
            return decision
        return evolve(decision, admit=no_rows(), ask_again_ms=None if len(decision.rows) else left)

    return schedule
