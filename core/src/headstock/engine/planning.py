"""Scheduling steps of an engine, each recorded, with errors that name who is at fault."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from headstock.engine.failure_texts import explain_contradiction, explain_scheduling_error
from headstock.errors import PLUGIN_FAILURES, HeadstockError
from headstock.record import Recorder
from headstock.scheduler import (
    Event,
    Plan,
    State,
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

    def begin(self, state: State, events: Sequence[Event]) -> None:
        """Begin a step by `events`.

        writes: state
        raises: EngineDied, PluginBroken
        """
        try:
            begin_step(state)
            apply_events(state, events)
        except PLUGIN_FAILURES as error:
            raise self._explain(error, events, state) from error

    def finish(self, state: State, applied: Sequence[Event], later: Sequence[Event]) -> Plan:
        """Apply the `later` events too, make the next plan, and record the step.

        writes: state
        raises: EngineDied, PluginBroken
        """
        events = [*applied, *later]
        try:
            apply_events(state, later)
            plan = finish_step(state)
        except PLUGIN_FAILURES as error:
            raise self._explain(error, events, state) from error
        self.recorder.record_step(events, state, plan)
        return plan

    def explain_idle_error(self, error: BaseException, cache: str) -> HeadstockError:
        """Make the error of an idle engine that still holds something, and record it."""
        recording = self.recorder.record_failure((), error)
        if isinstance(error, AssertionError):
            return explain_contradiction(error, cache, recording)
        return explain_scheduling_error(error, self.names, cache, recording)

    def _explain(
        self, error: BaseException, events: Sequence[Event], state: State
    ) -> HeadstockError:
        """Make the error of a step that raised, and record the step."""
        recording = self.recorder.record_failure(events, error)
        return explain_scheduling_error(error, self.names, state.limits.cache, recording)
