"""Traces are read by Perfetto as they are meant: nox -s perfetto."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from core.record.runs import make_requests, make_run_limits, record_run

from headstock.cli.main import main

from .processor import query_trace

COMPLAINTS = "select name, value from stats where severity != 'info' and value > 0"
SLICES = """
    select process.name, thread.name, slice.name, slice.ts, slice.dur from slice
    join thread_track on slice.track_id = thread_track.id join thread using (utid) join process
    using (upid)
"""
COUNTERS = """
    select process_counter_track.name, counter.ts, counter.value from counter
    join process_counter_track on counter.track_id = process_counter_track.id
"""
MAIN = """
    select process.name, thread.name from thread_track
    join thread using (utid) join process using (upid) where is_main_thread
"""
NESTED = "select count(*) from slice where depth > 0 or dur <= 0"

Event = dict[str, Any]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The trace of 150 requests under pressure."""
    folder = tmp_path_factory.mktemp("trace")
    path, drawn = folder / "run.recording", folder / "trace.json"
    record_run(path, make_run_limits(num_pages=80), make_requests(150), 900)
    assert main(["replay-view", str(path), "--timeline", str(drawn)]) == 0
    return drawn.read_bytes()


def read_names(events: list[Event], what: str) -> dict[tuple[int, int], str]:
    """The names that the trace gives."""
    return {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in events
        if e["ph"] == "M" and e["name"] == what
    }


def test_perfetto_has_no_complaint_and_finds_every_slice_on_its_track(trace: bytes) -> None:
    events: list[Event] = json.loads(trace)["traceEvents"]
    processes = {pid: name for (pid, _), name in read_names(events, "process_name").items()}
    threads = read_names(events, "thread_name")
    drawn = Counter(
        (
            processes[e["pid"]],
            threads[e["pid"], e["tid"]],
            e["name"],
            round(e["ts"] * 1000),
            round(e["dur"] * 1000),
        )
        for e in events
        if e["ph"] == "X"
    )

    complaints, slices, nested = query_trace(trace, (COMPLAINTS, SLICES, NESTED))

    assert complaints == [] and nested == [(0,)]
    assert Counter(slices) == drawn and sum(drawn.values()) > 1000
    assert {"queued", "prefill chunk", "decode", "preempted"} < {name for _, _, name, _, _ in drawn}


def test_counters_have_the_names_and_values_that_are_drawn(trace: bytes) -> None:
    events: list[Event] = json.loads(trace)["traceEvents"]
    drawn = Counter(
        (f"{e['name']} {key}", round(e["ts"] * 1000), float(value))
        for e in events
        if e["ph"] == "C"
        for key, value in e["args"].items()
    )

    (counters,) = query_trace(trace, [COUNTERS])

    assert Counter(counters) == drawn
    assert {name for name, _, _ in drawn} == {"step tokens", "rows decode", "rows prefill"}


def test_no_request_is_shown_as_the_main_thread(trace: bytes) -> None:
    (found,) = query_trace(trace, [MAIN])

    assert "requests" not in {process for process, _ in found}


def test_what_is_no_trace_is_refused() -> None:
    with pytest.raises(ValueError, match=r"(?i)trace"):
        query_trace(
            b"no trace at all, but some text that is long enough to be looked at", [COMPLAINTS]
        )
