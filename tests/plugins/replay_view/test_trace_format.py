"""Traces keep to their format, and the check of that finds traces that do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from core.record.runs import make_recorder, make_requests, make_run_limits, run_steps
from often import often
from plugins.replay_view.trace_format import find_faults

from headstock.cli.main import main
from headstock.record.recorded_step import PendingRecord
from headstock.scheduler import Aborted, Arrived, Sampled, initial_state, step


def trace_of(path: Path, tmp_path: Path) -> str:
    """The recording's trace."""
    assert main(["replay-view", str(path), "--timeline", str(tmp_path / "trace.json")]) == 0
    return (tmp_path / "trace.json").read_text(encoding="utf-8")


PAUSES = [0, 1, 500, 1_001, 99_999, 10**7, 7 * 10**9]
"""Nanoseconds between two steps: none at all where a clock is coarse, seconds where the machine
does something else.
"""


@pytest.mark.parametrize("overlap", often(1, [True, False]))
@pytest.mark.parametrize("pages", often(1, [80, 300]))
def test_a_trace_is_what_every_viewer_takes(overlap: bool, pages: int, tmp_path: Path) -> None:
    path, limits = tmp_path / "run.recording", make_run_limits(num_pages=pages, overlap=overlap)
    recorder, at, rng = make_recorder(limits, path), 10**15, np.random.default_rng(pages)
    for events, state, plan in run_steps(limits, make_requests(150), 900):
        at += int(rng.choice(PAUSES))
        admitted = tuple(
            entry
            for row in plan.new_row_ids.tolist()
            if (entry := state.requests_by_row[row]) is not None
        )
        recorder.add_record(PendingRecord(at, events, plan, admitted))
    recorder.close()

    assert find_faults(trace_of(path, tmp_path)) == []


def test_a_trace_with_a_failure_aborts_and_odd_names_is_too(tmp_path: Path) -> None:
    path, limits = tmp_path / "run.recording", make_run_limits(max_rows=2)
    recorder, state = make_recorder(limits, path), initial_state(limits)
    names = ['"quoted" \\ and\nbroken', "日本 😀", "</script>", "x" * 300]
    arrivals = [
        Arrived(evolve(one, id=name)) for one, name in zip(make_requests(4), names, strict=True)
    ]
    for events in (arrivals, [Aborted(names[2])], [Aborted(names[0])], []):
        plan = step(state, tuple(events))
        recorder.record_step(events, state, plan)
    bad = Sampled(np.array([9999]), np.array([1]), None, np.array([1]))
    recorder.record_failure([bad], IndexError('row 9999 "is" not there'))
    recorder.close()
    text = trace_of(path, tmp_path)

    assert find_faults(text) == []
    assert {
        event["args"]["name"] for event in json.loads(text)["traceEvents"] if event["ph"] == "M"
    } >= set(names)


def test_the_tail_of_a_run_makes_a_whole_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    recorder = make_recorder(make_run_limits(), None)
    for events, state, plan in run_steps(make_run_limits(), make_requests(200), 700):
        recorder.record_step(events, state, plan)
    recorder.write_crash_recording()
    (path,) = tmp_path.glob("*.recording")

    assert find_faults(trace_of(path, tmp_path)) == []


NAMED = [
    {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "p"}},
    {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "t"}},
]
AT = {"pid": 1, "tid": 1, "name": "n"}
WRONG: dict[str, Any] = {
    "NaN": [{"ph": "X", **AT, "ts": 0, "dur": float("nan")}],
    "phase 'Q'": [{"ph": "Q", **AT, "ts": 0}],
    "no name": [{"ph": "X", **AT, "name": 3, "ts": 0, "dur": 1}],
    "pid and tid": [{"ph": "X", **AT, "pid": "1", "ts": 0, "dur": 1}],
    "ts is None": [{"ph": "X", **AT, "dur": 1}],
    "dur is None": [{"ph": "X", **AT, "ts": 1}],
    "dur is -1": [{"ph": "X", **AT, "ts": 1, "dur": -1}],
    "a counter without numbers": [{"ph": "C", **AT, "ts": 1, "args": {"a": "1"}}],
    "changes its series": [
        {"ph": "C", **AT, "ts": ts, "args": {key: 1}} for ts, key in ((1, "a"), (2, "b"))
    ],
    "scope 'x'": [{"ph": "i", **AT, "ts": 1, "s": "x"}],
    "comes after": [{"ph": "X", **AT, "ts": ts, "dur": 1} for ts in (5, 3)],
    "ends past the slice": [{"ph": "X", **AT, "ts": ts, "dur": 4} for ts in (1, 3)],
    "never ends": [{"ph": "B", **AT, "ts": 1}],
    "ends but did not begin": [{"ph": "B", **AT, "ts": 1}, {"ph": "E", **AT, "name": "m", "ts": 2}],
    "without a name": [{"ph": "X", **AT, "tid": 2, "ts": 1, "dur": 1}],
    "named twice": [NAMED[1]],
    "no object": ["x"],
}


@pytest.mark.parametrize("said", WRONG)
def test_a_trace_that_is_not_is_found_out(said: str) -> None:
    found = find_faults(json.dumps({"traceEvents": [*NAMED, *WRONG[said]]}))

    assert found and said in found[0]


def test_other_files_are_no_traces() -> None:
    assert (
        find_faults("[1")
        and find_faults("[]")
        and find_faults('{"traceEvents":[],"traceEvents":[]}')
        and find_faults("{}")
    )
    good = [
        {"ph": "B", **AT, "ts": 1},
        {"ph": "X", **AT, "ts": 1, "dur": 1},
        {"ph": "E", **AT, "ts": 2},
    ]
    assert find_faults(json.dumps({"traceEvents": [*NAMED, *good]})) == []
