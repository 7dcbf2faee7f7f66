"""An LLM that is dropped without `close`: a warning, and nothing of it stays."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headstock import LLM, SamplingParams
from headstock.engine.loop import Loop

Make = Callable[..., tuple[LLM, Any]]
TESTS = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
}

DROPPED = """
import gc, json, os, sys, threading, time, warnings
from core.faults.census import resident
from headstock import LLM, SamplingParams

def tasks():
    return len(os.listdir("/proc/self/task"))

def drop(in_a_cycle):
    # The canary writes to all of the KV pool, which many prompts would take seconds to do.
    llm = LLM("demo", num_pages=1024, page_size=16, max_running_requests=8, debug_canary=True)
    prompts = [{"prompt_token_ids": [5 + i] * 90} for i in range(8)]
    llm.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True))
    if in_a_cycle:
        llm.itself = llm

warnings.simplefilter("always")
seen = []
for number in range(4):
    with warnings.catch_warnings(record=True) as caught:
        drop(number % 2 == 1)
        gc.collect()
    deadline = time.monotonic() + 600
    while any(thread.name.startswith("headstock") for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "its threads stay"
        time.sleep(0.01)
    gc.collect()
    said = [str(each.message) for each in caught if each.category is ResourceWarning]
    seen.append({"said": said, "threads": tasks(), "resident": resident()})
print(json.dumps(seen))
"""


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux says what a process has")
def test_a_dropped_llm_warns_and_leaves_no_thread_and_no_memory() -> None:
    result = subprocess.run(
        [sys.executable, "-c", DROPPED],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=ENVIRONMENT,
    )
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout)

    warning = "an LLM (demo) was dropped without close(); close it, or use `with LLM(...) as llm:`"
    assert [each["said"] for each in seen] == [[warning]] * 4
    assert len({each["threads"] for each in seen}) == 1
    # One keeps 200 MiB, so two that stayed would be 400. What the allocator holds of
    # those that went goes up and down by 30 to 60 MiB in a process that drops fourteen, and is no
    # more at the end than at the third.
    assert seen[-1]["resident"] - seen[1]["resident"] < 75


@pytest.mark.full
def test_a_process_that_ends_right_after_an_llm_was_dropped_ends_well() -> None:
    code = "from headstock import LLM; llm = LLM('demo', num_pages=512); llm.generate('a'); del llm"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0 and len(result.stderr.splitlines()) == 1
    assert "an LLM was dropped without close()" in result.stderr and "model=demo" in result.stderr


def test_an_llm_is_dropped_only_once_its_stream_has_ended(scripted: Make) -> None:
    other, loop = scripted()
    llm = LLM(config=other._session.config, start=lambda config: (other._session.engine, loop))
    stream = llm.stream("x", SamplingParams(max_tokens=8, ignore_eos=True))
    del llm
    gc.collect()
    next(stream)
    assert loop.abandoned == 0

    with pytest.warns(ResourceWarning, match="was dropped without close"):
        rest = list(stream)
    assert len(rest) == 7 and rest[-1].finished
    assert loop.abandoned == 1


class SlowEngine:
    """Counts how often it is closed, and when; its step waits for `go`."""

    has_work = True
    arrivals = SimpleNamespace(queue=("an abort",))

    def __init__(self) -> None:
        self.go, self.closed_by = threading.Event(), list[str]()
        self.stepping = threading.Event()
        self.error: Exception | None = None

    def step(self, _deliver: Any) -> tuple[()]:
        self.stepping.set()
        self.go.wait(600)
        if self.error is not None:
            raise self.error
        return ()

    def unfinished(self) -> list[Any]:
        return []

    def close(self) -> None:
        self.closed_by.append(threading.current_thread().name)


def test_an_abandoned_loop_waits_for_nothing_and_closes_its_engine_after_the_step_in_flight() -> (
    None
):
    engine = SlowEngine()
    loop = Loop(engine)  # type: ignore[arg-type]
    engine.stepping.wait(600)
    loop.abandon()
    assert engine.closed_by == []
    engine.go.set()
    loop.thread.join(600)
    assert engine.closed_by == ["headstock-engine"]


def test_a_loop_whose_engine_died_is_abandoned_by_closing_it_at_once() -> None:
    engine = SlowEngine()
    engine.error = RuntimeError("died")
    loop = Loop(engine)  # type: ignore[arg-type]
    engine.go.set()
    loop.thread.join(600)
    assert engine.closed_by == []
    loop.abandon()
    loop.abandon()
    assert engine.closed_by == ["MainThread"]
