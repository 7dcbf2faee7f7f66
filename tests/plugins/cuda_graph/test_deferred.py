"""Graphs that are captured at their first use or while the engine is idle."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from often import often
from rerun import RerunCapturer, capture
from toy_engine import EngineHarness, Toys, random_requests, request

from headstock import SamplingParams
from headstock.engine import loop as loops
from headstock.engine.engine import Engine
from headstock.engine.loop import Loop
from headstock.outputs import Update
from headstock.spi import ReplayLimits, ReplaySizes
from headstock_cuda_graph.buckets import row_buckets, token_buckets
from headstock_cuda_graph.runner import CudaGraphRunner

SIZES = {"max_running_requests": 17, "max_batch_tokens": 50, "num_pages": 300}


def deferring(toys: Toys, **settings: Any) -> Engine:
    """An engine that defers captures, and fails when a free page is written."""
    watched = {"debug_invariants": False, "debug_canary": True}
    return toys.engine(**({"runner": "rerun"} | watched | SIZES | settings))


def runner_of(engine: Engine) -> CudaGraphRunner:
    """The engine's runner."""
    executor: Any = engine.executor
    while not hasattr(executor, "runner"):
        executor = executor.inner
    return getattr(executor.runner, "inner", executor.runner)


def list_captured(engine: Engine) -> tuple[object, ...]:
    """All that is captured, by kind and size, with the kinds of sampling."""
    runner = runner_of(engine)
    assert runner.prompts is not None
    return (
        [*runner.buckets.of_kind("prompt")],
        {size: set(each.samplers) for size, each in runner.buckets.of_kind("rows").items()},
        {rows: set(each.samplers) for rows, each in runner.buckets.of_kind("verify").items()},
    )


def capture_all(engine: Engine) -> int:
    """Capture what is left; return the number of captures."""
    count = 0
    while not engine.late_captures.is_done:
        engine.prepare_next()
        count += 1
        assert count < 1000
    return count


@pytest.mark.feature("V7")
def test_a_start_captures_the_largest_sizes_and_a_step_the_ones_that_it_needs(toys: Toys) -> None:
    engine = deferring(toys)
    runner = runner_of(engine)
    assert runner.prompts is not None
    assert ([*runner.buckets.of_kind("prompt")], [*runner.buckets.of_kind("rows")]) == ([64], [17])
    (note,) = (note for note in engine.summary.notes if "graphs" in note)
    assert "graphs for 6 batch sizes up to 17 and 4 token counts up to 64" in note
    assert note.endswith("the others at their first use or when idle")

    EngineHarness(engine).run([request("a", range(1, 10), 4)])
    assert ([*runner.buckets.of_kind("prompt")], [*runner.buckets.of_kind("rows")]) == (
        [16, 64],
        [1, 17],
    )
    stats = engine.stats()
    assert stats.replayed_steps == stats.executed_steps
    engine.close()


@pytest.mark.parametrize("may_defer", [True, False])
def test_a_runner_prepares_what_it_is_asked_for(toys: Toys, may_defer: bool) -> None:
    engine, reports = deferring(toys), list[tuple[int, int]]()
    runner = runner_of(engine)

    def prepare(**limits: int) -> ReplaySizes:
        reports.clear()
        wanted = ReplayLimits(**limits, may_defer=may_defer)
        sizes = runner.prepare(wanted, lambda *counts: reports.append(counts))
        total = len(sizes.rows) + len(sizes.tokens)
        assert sizes.num_left == total - len(reports)
        assert reports == [(number, total) for number in range(1, len(reports) + 1)]
        # The largest of each kind are made at once.
        assert len(reports) == (bool(sizes.rows) + bool(sizes.tokens) if may_defer else total)
        return sizes

    assert prepare() == ReplaySizes()
    assert prepare(max_tokens=16) == ReplaySizes()
    sizes = prepare(max_rows=4, max_tokens=40, full_tokens=72)
    assert (sizes.rows, sizes.tokens) == ((4, 2, 1), (72, 48, 32, 16))
    sizes = prepare(max_rows=2, full_tokens=72)
    assert (sizes.rows, sizes.tokens) == ((2, 1), ())
    if sizes.num_left:
        while runner.prepare_next():
            pass
    assert sorted(runner.buckets.of_kind("rows"), reverse=True) == [*sizes.rows]
    assert prepare(max_rows=0) == ReplaySizes() and not runner.buckets.of_kind("rows")
    engine.close()


@pytest.mark.feature("G10")
@pytest.mark.parametrize("settings", [{}, {"proposer": "guess", "opt": ("guess.right=1.0",)}])
def test_every_size_is_captured_in_the_end(toys: Toys, settings: dict[str, Any]) -> None:
    late, early = deferring(toys, **settings), deferring(toys, defer_graphs=False, **settings)
    assert early.late_captures.is_done and list_captured(late) != list_captured(early)

    assert capture_all(late) > len(row_buckets(17)) + len(token_buckets(50))
    assert list_captured(late) == list_captured(early)
    for engine in (late, early):
        engine.close()


@pytest.mark.feature("G2")
@pytest.mark.parametrize(
    ("attn", "overlap"),
    often(1, [("toy,toy-planned", True), ("toy", True), ("toy-planned", False), ("toy", False)]),
)
def test_captures_between_steps_change_no_token(toys: Toys, attn: str, overlap: bool) -> None:
    rng = np.random.default_rng(5)
    requests = random_requests(rng, 24)
    eager = EngineHarness(deferring(toys, attn=attn, overlap=overlap, runner="eager"))
    expected = eager.run(requests).outputs
    eager.engine.close()

    # Of all engines the last one captures between any two steps, in the middle of a size too.
    for share in (0.0, 1.0):
        engine = deferring(toys, attn=attn, overlap=overlap)
        harness = EngineHarness(engine)
        for one in requests:
            harness.submit(one)
        while engine.has_work:
            harness.step()
            if rng.random() < share:
                engine.prepare_next()
        assert harness.drain().outputs == expected
        stats = engine.stats()
        assert stats.replayed_steps == stats.executed_steps
        engine.close()


@pytest.mark.parametrize("when", ["a step needs it", "the engine is idle"])
def test_a_late_capture_that_fails_is_one_warning_and_steps_run_without_graphs(
    toys: Toys, when: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    requests = [request(str(i), range(1, 9 + i), 12) for i in range(4)]
    expected = EngineHarness(deferring(toys, runner="eager")).run(requests).outputs
    engine, tries = deferring(toys), []
    before = list_captured(engine)

    def fail(work: Any, *, warm: bool) -> Any:
        tries.append(work)
        raise MemoryError("out of memory")

    monkeypatch.setattr("rerun.capture", fail)
    with caplog.at_level(logging.WARNING, "headstock"):
        if when == "the engine is idle":
            capture_all(engine)
        outputs = EngineHarness(engine).run(requests).outputs
        capture_all(engine)

    assert outputs == expected and len(tries) == 1 and list_captured(engine) == before
    (warning,) = caplog.records
    assert "no more graphs are captured" in warning.getMessage()
    assert "MemoryError: out of memory, at " in warning.getMessage()
    # The largest sizes are captured: no step was as large.
    assert engine.stats().replayed_steps == 0
    engine.close()


@pytest.mark.feature("G11")
def test_a_capture_that_fails_at_the_start_turns_graphs_off(
    toys: Toys, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "headstock"):
        engine = deferring(toys, faults=("capture",))
    (warning,) = caplog.records
    assert "graphs are off" in warning.getMessage()
    assert engine.late_captures.is_done
    EngineHarness(engine).run([request("a", range(1, 9), 12)])
    assert not runner_of(engine).buckets.of_kind("rows")
    engine.close()


def test_a_size_that_is_not_worth_a_graph_is_judged_once(
    toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[object] = []

    def judge(capturer: RerunCapturer, work: object, hidden: float) -> bool:
        judged.append(work)
        return len(judged) == 1  # the largest alone

    monkeypatch.setattr(RerunCapturer, "is_worthwhile", judge)
    engine = deferring(toys, overlap=False)
    for name in "ab":
        EngineHarness(engine).run([request(name, range(1, 10), 2)])
    assert [*runner_of(engine).buckets.of_kind("prompt")] == [64] and len(judged) == 2
    engine.close()


def test_debug_flags_that_watch_steps_have_all_captured_before_them(toys: Toys) -> None:
    engine = deferring(toys, debug_invariants=True)
    assert [*runner_of(engine).buckets.of_kind("rows")] == [*reversed(row_buckets(17))]
    assert engine.late_captures.is_done
    engine.close()


class WatchedLoop:
    """A loop over an engine, whose steps and captures are noted; it captures when idle at once.

    during: called in each capture
    """

    def __init__(self, toys: Toys) -> None:
        self.engine = deferring(toys)
        self.events: list[str] = []
        self.during: Any = lambda: None
        step, prepare_next = self.engine.step, self.engine.prepare_next

        def noted_step(*deliver: Any) -> tuple[Update, ...]:
            self.events.append("step")
            return step(*deliver)

        def noted_capture() -> None:
            self.events.append("capture" if not self.engine.has_work else "capture with work")
            self.during()
            prepare_next()

        self.engine.step = noted_step  # type: ignore[method-assign]
        self.engine.prepare_next = noted_capture  # type: ignore[method-assign]
        self.ended = threading.Event()

    def start(self) -> Loop:
        """Start the loop."""
        self.loop = Loop(self.engine)
        return self.loop

    def submit(self) -> None:
        """Submit a request."""
        self.loop.submit(request("a", range(1, 9), 6), self.note)

    def note(self, update: Update) -> None:
        """Note an update."""
        if update.finish_reason is not None:
            self.events.append("answered")
            self.ended.set()


@pytest.fixture
def watched(toys: Toys, monkeypatch: pytest.MonkeyPatch) -> Iterator[WatchedLoop]:
    """A loop that is not started yet."""
    monkeypatch.setattr(loops, "_SECONDS_BEFORE_CAPTURES", 0.0)
    watched = WatchedLoop(toys)
    yield watched
    watched.loop.close()
    watched.engine.close()


@pytest.mark.feature("V7")
def test_a_request_that_arrives_while_graphs_are_captured_waits_for_one(
    watched: WatchedLoop,
) -> None:
    started = threading.Event()

    def submit_in_the_third() -> None:
        assert started.wait(600)
        if watched.events.count("capture") == 3 and "step" not in watched.events:
            watched.submit()

    watched.during = submit_in_the_third
    watched.start()
    started.set()
    assert watched.ended.wait(600)
    answered = watched.events[: watched.events.index("answered")]
    assert answered[:4] == ["capture", "capture", "capture", "step"]
    assert set(answered[3:]) == {"step"}


@pytest.mark.feature("V7")
def test_graphs_are_captured_while_there_is_no_work_until_all_are(watched: WatchedLoop) -> None:
    done = threading.Event()

    def look() -> None:
        if watched.engine.late_captures.is_done:
            done.set()

    watched.loop = Loop(watched.engine, after_step=look)
    watched.submit()
    assert watched.ended.wait(600) and done.wait(600)
    assert "capture with work" not in watched.events and "capture" in watched.events
    assert [*runner_of(watched.engine).buckets.of_kind("rows")] == [*reversed(row_buckets(17))]


def test_an_engine_that_closes_during_a_capture_captures_no_more(watched: WatchedLoop) -> None:
    inside, closing = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert closing.wait(600)

    watched.during = wait
    loop = watched.start()
    assert inside.wait(600)
    closer = threading.Thread(target=loop.close)
    closer.start()
    while not loop.closing:
        pass
    closing.set()
    closer.join(600)
    assert watched.events == ["capture"] and loop.has_ended


def test_an_engine_that_was_just_busy_does_not_capture_yet(
    toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "_SECONDS_BEFORE_CAPTURES", 1000.0)
    watched = WatchedLoop(toys)
    watched.start()
    watched.submit()
    assert watched.ended.wait(600)
    watched.loop.close()
    watched.engine.close()
    assert "capture" not in watched.events


def test_a_kind_of_sampling_is_captured_for_a_size_that_is_captured_later(toys: Toys) -> None:
    params = SamplingParams(temperature=0.8, top_k=3, seed=4, max_tokens=9)
    requests = [request(str(i), range(1, 9), 9, params=params) for i in range(3)]
    expected = EngineHarness(deferring(toys, runner="eager")).run(requests).outputs
    engine = deferring(toys)
    for _ in range(5):  # into the middle of the first size
        engine.prepare_next()
    assert EngineHarness(engine).run(requests).outputs == expected
    capture_all(engine)
    assert {len(each.samplers) for each in runner_of(engine).buckets.of_kind("rows").values()} == {
        2,
        3,
    }
    engine.close()


def test_a_graph_is_one_piece_of_the_work(toys: Toys, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, count = deferring(toys), 0

    def counted(work: Any, *, warm: bool) -> Any:
        nonlocal count
        count += 1
        return capture(work, warm=warm)

    monkeypatch.setattr("rerun.capture", counted)
    while not engine.late_captures.is_done:
        before = count
        engine.prepare_next()
        assert count - before <= 1
    assert count > 2 * len(row_buckets(17))
    engine.close()
