"""An engine sleeps while its scheduler idles on purpose, and wakes for what happens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from toy_engine import EngineHarness, Toys, expected, installed, request

from headstock.engine.engine import Engine
from headstock.engine.loop import Loop
from headstock.outputs import Update
from headstock.record import ReplayedStep, read_recording, replay_recording, restore_limits

FOR_LONG = ("windowed.window_ms=600000", "windowed.least=2")
SECONDS = 60.0
"""What a wait that is not ended would exceed, and no busy machine does."""


@pytest.fixture
def windowed(tmp_path: Path) -> Iterator[Toys]:
    """The toys, with the scheduler `windowed` among them."""
    info = tmp_path / "windowed-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: windowed\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[headstock.scheduler]\nwindowed = windowed:spec\n")
    with installed(tmp_path) as toys:
        yield toys


@pytest.fixture
def long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler may ask for ten minutes."""
    monkeypatch.setattr("headstock.scheduler.selection.MAX_ASK_AGAIN_MS", 600_000)


class Sink:
    """Gets the updates of a request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.reason: str | None = None
        self.ended = threading.Event()

    def __call__(self, update: Update) -> None:
        self.tokens += update.tokens
        if update.finish_reason is not None:
            self.reason = update.finish_reason
            self.ended.set()


def wait_until_asleep(engine: Engine) -> None:
    """Wait until the scheduler has asked for a wait."""
    for _ in range(int(SECONDS * 100)):
        if engine.state.next_ask and engine.state.waiting and not engine.arrivals.queue:
            return
        threading.Event().wait(0.01)
    raise AssertionError("the scheduler was not asked")


@pytest.mark.usefixtures("long_waits")
@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_that_comes_ends_the_wait(windowed: Toys, overlap: bool) -> None:
    engine = windowed.engine(scheduler="windowed", opt=FOR_LONG, overlap=overlap)
    loop, sinks = Loop(engine), [Sink(), Sink()]
    # Of other prompts: a request waits for one that computes its prefix.
    first, second = request("a", range(5), 9), request("b", range(7, 12), 9)
    loop.submit(first, sinks[0])
    wait_until_asleep(engine)
    steps = engine.state.num_steps
    threading.Event().wait(0.3)
    assert engine.state.num_steps <= steps + 2, "it sleeps"
    loop.submit(second, sinks[1])
    for sink, one in zip(sinks, (first, second), strict=True):
        assert sink.ended.wait(SECONDS)
        assert sink.tokens == expected(one)
    loop.close()
    engine.close()


@pytest.mark.usefixtures("long_waits")
@pytest.mark.parametrize("how", ["abort", "close", "abandon"])
def test_aborts_and_shutdown_end_the_wait(windowed: Toys, how: str) -> None:
    engine = windowed.engine(scheduler="windowed", opt=FOR_LONG)
    loop, sink = Loop(engine), Sink()
    loop.submit(request("a", range(5), 9), sink)
    wait_until_asleep(engine)
    if how == "abort":
        loop.abort("a")
    else:
        threading.Thread(target=getattr(loop, how), daemon=True).start()
    assert sink.ended.wait(SECONDS)
    assert sink.reason == "abort"
    if how == "abort":
        loop.close()
    loop.thread.join(SECONDS)
    assert not loop.thread.is_alive()
    if how != "abandon":
        engine.close()


def test_windows_pass_and_their_recording_replays(windowed: Toys, tmp_path: Path) -> None:
    path = tmp_path / "schedule"
    settings: dict[str, Any] = {"scheduler": "windowed", "opt": ("windowed.window_ms=20",)}
    engine = windowed.engine(record=str(path), **settings)
    requests = [request(f"{i}", range(i, 5 + i), 6) for i in range(9)]
    loop, sinks = Loop(engine), [Sink() for _ in requests]
    for start in range(0, len(requests), 3):
        for one, sink in list(zip(requests, sinks, strict=True))[start : start + 3]:
            loop.submit(one, sink)
        for sink in sinks[start : start + 3]:
            assert sink.ended.wait(SECONDS)
    loop.close()
    engine.close()

    assert [sink.tokens for sink in sinks] == list(map(expected, requests))
    recording = read_recording(str(path))
    waits: list[int] = []

    def note_wait(replayed: ReplayedStep) -> None:
        if replayed.after is not None and replayed.after.next_ask:
            waits.append(replayed.after.next_ask - replayed.after.milliseconds)

    result = replay_recording(recording, restore_limits(recording.header), note_wait)
    assert result.divergence is None and result.is_complete
    assert len(waits) >= 3 and set(waits) <= set(range(1, 21))


def test_an_engine_without_a_loop_steps_through_windows(windowed: Toys) -> None:
    engine = windowed.engine(scheduler="windowed", opt=("windowed.window_ms=30",))
    requests = [request(f"{i}", range(i, 5 + i), 6) for i in range(5)]
    assert EngineHarness(engine).run(requests).outputs == {
        one.id: expected(one) for one in requests
    }
    engine.close()
