"""Runs that are told what to do step by step, and watched; and a recording that means harm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from attrs import evolve
from core.record.runs import make_recorder, make_requests, make_run_limits
from toy_workloads import limits

from headstock.record.file import read_recording
from headstock.record.recorded_step import RecordedStep
from headstock.record.replay import ReplayedStep, replay_steps
from headstock.scheduler import (
    Aborted,
    Arrived,
    Event,
    Limits,
    Plan,
    Sampled,
    State,
    initial_state,
    step,
)
from headstock_replay_view.history import History
from headstock_replay_view.page import render_html
from headstock_replay_view.page_data import collect_page_data

MS = 1_000_000
ONE_ROW = limits(max_rows=1, max_batch_tokens=4, policy=None)
HOSTILE = (
    "</script><script>alert(1)</script><img src=x "
    "onerror=alert(2)>&\u202e\n\"'`${alert(3)}{{ data }}"
)


def run_script(engine: Limits, script: Sequence[tuple[float, list[Event]]]) -> History:
    """The history of a run: a step at each time, in milliseconds.

    Its events are those given, and a token for each row that the step before sampled.
    """
    state, history, told = initial_state(engine), History(engine), list[Event]()
    for number, (at, more) in enumerate(script):
        events = [*told, *more]
        plan = step(state, events)
        show_step(history, number, int(at * MS), events, state, plan)
        rows = plan.samples > 0
        tokens = np.full(np.count_nonzero(rows), 9, np.int32)
        told = (
            [Sampled(plan.rows[rows], plan.admission_ids[rows], None, tokens)]
            if len(tokens)
            else []
        )
    return history


def show_step(
    history: History, number: int, at: int, events: list[Event], state: State, plan: Plan
) -> None:
    """Show a step to a history."""
    recorded = RecordedStep(
        number=number, at=at, events=tuple(events), plan=plan, admissions=(), error=""
    )
    history.add_step(ReplayedStep(recorded=recorded, after=state, divergence=None))


def hostile_page(folder: Path) -> str:
    """The page of a recording in which every text is hostile."""
    engine, path = make_run_limits(max_rows=2), folder / "run.recording"
    recorder, state = make_recorder(engine, path), initial_state(engine)
    recorder.header |= {"model": HOSTILE, "headstock": HOSTILE}
    arrivals = [
        Arrived(evolve(one, id=f"{number}{HOSTILE}")) for number, one in enumerate(make_requests(4))
    ]
    ids = [arrived.request.id for arrived in arrivals]
    for events in (arrivals, [Aborted(ids[3], HOSTILE)], [Aborted(ids[0], HOSTILE)], []):
        plan = step(state, tuple(events))
        recorder.record_step(events, state, plan)
    recorder.close()
    recording, history = read_recording(path), History(engine)
    for replayed in replay_steps(recording.read_steps(), engine):
        history.add_step(replayed)
    header = dict(recording.header) | dict.fromkeys(
        ("model", "headstock", "scheduler", "cache"), HOSTILE
    )
    return render_html(collect_page_data(history, header, HOSTILE))
