"""Scheduling steps of an engine, each recorded, with errors that name who is at fault."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from headstock.engine.step_failures import explain_contradiction, explain_scheduling_error
from headstock.errors import PLUGIN_FAILURES, HeadstockError
from headstock.record import Recorder
from headstock.scheduler import (
    Event,
    Limits,
    Plan,
    State,
    WorkingState,
    apply_events,
    begin_step,
    finish_step,
)
from headstock.startup.blame import PluginNames


@frozen(eq=False)
class RecordedPlanning:
    """Makes scheduling steps in two parts, and records them."""

    recorder: Recorder
    names: PluginNames

    def begin(self, state: State, events: Sequence[Event], limits: Limits) -> WorkingState:
        """Begin a step by `events`.   raises: EngineDied, PluginBroken"""
        try:
            working = begin_step(state, limits)
            apply_events(working, events)
        except PLUGIN_FAILURES as error:
            raise self._explain(error, events, limits) from error
        return working

    def finish(
        self, working: WorkingState, applied: Sequence[Event], later: Sequence[Event]
    ) -> tuple[State, Plan]:
        """Apply the `later` events too, make the next plan, and record the step.

        raises: EngineDied, PluginBroken
        """
        events = [*applied, *later]
        try:
            apply_events(working, later)
            state, plan = finish_step(working)
        except PLUGIN_FAILURES as error:
            raise self._explain(error, events, working.limits) from error
        self.recorder.record_step(events, state, plan)
        return state, plan

    def explain_idle_error(self, error: BaseException, cache: str) -> HeadstockError:
        """Make the error of an idle engine that still holds something, and record it."""
        recording = self.recorder.record_failure((), error)
        if isinstance(error, AssertionError):
            return explain_contradiction(error, cache, recording)
        return explain_scheduling_error(error, self.names, cache, recording)

    def _explain(
        self, error: BaseException, events: Sequence[Event], limits: Limits
    ) -> HeadstockError:
        """Make the error of a step that raised, and record the step."""
        recording = self.recorder.record_failure(events, error)
        return explain_scheduling_error(error, self.names, limits.cache, recording)
