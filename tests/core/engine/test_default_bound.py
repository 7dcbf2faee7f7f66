"""The bound on steps beside streams that a CPU has by default, on devices whose times are set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import define, field
from core.faults.conftest import crash_reports, toys
from often import often
from toy_engine import Toys, request

from headstock.config import EngineConfig
from headstock.engine.pacing import READER_SECONDS, StepWork, make_pacer
from headstock.record import read_recording, replay_recording, restore_limits
from headstock.scheduler import Paced, Plan

__all__ = ["crash_reports", "toys"]

Milliseconds = Callable[[StepWork], float]


def take_milliseconds(fixed: float, a_token: float, noise: float = 0.0) -> Milliseconds:
    """A device of so many milliseconds a step and a prompt token, some steps of it slower."""
    rng = np.random.default_rng(2)

    def taken(work: StepWork) -> float:
        slower = 1 + noise * float(rng.random() < 0.2)
        return slower * (fixed + a_token * work.prompt_tokens + 1e-6 * work.prompt_pairs)

    return taken


@define
class Served:
    """What a device did.

    steps: decode rows and milliseconds of each step
    gaps: milliseconds between two tokens of the stream, from its second token on
    total: milliseconds from the arrival of the prompts to the end of the last of them
    """

    steps: list[tuple[int, float]] = field(factory=list)
    gaps: list[float] = field(factory=list)
    total: float = 0.0


def serve(
    toys: Toys,
    taken: Milliseconds,
    *,
    streams: bool = True,
    prompts: int = 16,
    answer: int = 1_500,
    **settings: Any,
) -> Served:
    """Prompts of 1,400 tokens come together behind a stream, whose reader asks again at its end."""
    engine = toys.engine(
        max_batch_tokens=8192,
        max_running_requests=32,
        num_pages=16_000,
        max_seq_len=2_000,
        overlap=False,
        debug_invariants=False,
        **settings,
    )
    served, now = Served(), 0.0
    engine.step_clock.now = lambda: now / 1000
    execute = engine.executor.execute

    def timed(plan: Plan, *arguments: Any) -> Any:
        nonlocal now
        served.steps.append((plan.num_decode, taken(StepWork.of(plan))))
        now += served.steps[-1][1]
        return execute(plan, *arguments)

    engine.executor.execute = timed  # type: ignore[method-assign]
    stream = request("stream", range(20), answer)
    engine.submit(stream, stream_tokens=streams)
    for _ in range(100):
        engine.step()
    rng = np.random.default_rng(1)
    for number in range(prompts):
        prompt = rng.integers(0, 50, 1_400)
        engine.submit(request(str(number), prompt, 1), stream_tokens=False)
    arrival, last, left = now, now, prompts
    while left:
        for update in engine.step():
            left -= update.id != "stream" and update.finish_reason is not None
            if update.id == "stream" and update.tokens:
                served.gaps.append(now - last)
                last = now
            if update.id == "stream" and update.finish_reason is not None:
                engine.submit(stream, stream_tokens=streams)
    served.total = now - arrival
    engine.abort("stream")
    for _ in range(5):
        engine.step()
    engine.close()
    return served


DEVICES: dict[str, tuple[float, float, float]] = {
    # milliseconds of a step and of a prompt token, the share by which some steps are slower
    "the demo model": (4.0, 0.3, 0.0),
    "a faster one": (2.0, 0.02, 0.0),
    "beside other programs": (4.0, 0.3, 1.0),
}


@pytest.mark.feature("V1")
@pytest.mark.parametrize("name", often(1, DEVICES))
def test_no_stream_stands_still_behind_prompts_and_these_are_hardly_slower(
    toys: Toys, name: str
) -> None:
    fixed, a_token, noise = DEVICES[name]
    bounded = serve(toys, take_milliseconds(fixed, a_token, noise))
    free = serve(toys, take_milliseconds(fixed, a_token), max_itl_ms=None)

    assert max(bounded.gaps) < 650
    assert name == "a faster one" or max(free.gaps) > 2_000
    # In the mean the noise takes so much of any schedule; of three long steps it may hit none.
    assert bounded.total < 1.1 * free.total * (1 + 0.2 * noise)


@pytest.mark.feature("V1")
@pytest.mark.parametrize("answer", often(1, [120, 105, 150]))
@pytest.mark.parametrize("prompts", often(1, [16, 64]))
def test_a_reader_who_asks_again_has_a_first_token_as_soon(
    toys: Toys, answer: int, prompts: int
) -> None:
    taken = take_milliseconds(4.0, 0.3)
    served = serve(toys, taken, answer=answer, prompts=prompts)
    assert max(served.gaps) < 1_000
    free = serve(toys, taken, answer=answer, prompts=prompts, max_itl_ms=None)
    assert max(free.gaps) > 2_000
    assert served.total < 1.1 * free.total


@pytest.mark.feature("V1")
def test_a_device_whose_steps_are_long_gives_prompts_ten_times_as_long(toys: Toys) -> None:
    taken = take_milliseconds(80.0, 4.0)
    bounded, free = (
        serve(toys, taken, prompts=4, **settings) for settings in ({}, {"max_itl_ms": None})
    )
    assert 400 < max(bounded.gaps[10:]) <= 800 < 20_000 < max(free.gaps)
    assert bounded.total < 1.2 * free.total


def test_where_nobody_reads_along_nothing_is_bounded(toys: Toys) -> None:
    taken = take_milliseconds(4.0, 0.3)
    alone, free = (
        serve(toys, taken, streams=False, **settings) for settings in ({}, {"max_itl_ms": None})
    )
    assert alone.steps == free.steps


def test_the_bound_ends_some_time_after_the_stream(toys: Toys, tmp_path: Path) -> None:
    path = tmp_path / "bounded.recording"
    engine = toys.engine(
        max_batch_tokens=2048,
        num_pages=4_000,
        max_seq_len=2_000,
        overlap=False,
        record=str(path),
        record_prompts=True,
    )
    now = 0.0
    engine.step_clock.now = lambda: now / 1000
    execute, taken, largest = engine.executor.execute, take_milliseconds(4.0, 1.0), list[int]()

    def timed(plan: Plan, *arguments: Any) -> Any:
        nonlocal now
        work = StepWork.of(plan)
        now += taken(work)
        largest.append(work.prompt_tokens)
        return execute(plan, *arguments)

    engine.executor.execute = timed  # type: ignore[method-assign]

    def run(names: Sequence[str]) -> int:
        """The most prompt tokens of a step, of prompts of 1,000 tokens."""
        del largest[:]
        rng = np.random.default_rng(len(names[0]))
        for name in names:
            engine.submit(request(name, rng.integers(0, 50, 1_000), 1), stream_tokens=False)
        waiting = set(names)
        while waiting:
            waiting -= {update.id for update in engine.step() if update.finish_reason}
        return max(largest)

    engine.submit(request("stream", range(20), 1_500))
    engine.submit(request("batch", range(30), 1_500), stream_tokens=False)
    for _ in range(40):
        engine.step()
    beside = run(["a", "b", "c"])
    engine.abort("stream")
    lately = run(["aa", "bb", "cc"])
    now += 1000 * READER_SECONDS
    behind = run(["aaa", "bbb", "ccc"])
    for name in ("batch",):
        engine.abort(name)
    while engine.has_work:
        engine.step()
    engine.close()
    assert beside <= 256 and lately <= 256 and behind >= 1_500

    recording = read_recording(path)
    paced = [
        event.prompt_tokens
        for step in recording.read_steps()
        for event in step.events
        if isinstance(event, Paced)
    ]
    assert paced[-1] == 2048 > min(paced)
    assert replay_recording(recording, restore_limits(recording.header)).divergence is None


@pytest.mark.parametrize(
    ("value", "device", "bound", "is_default"),
    [
        ("auto", "cpu", 300.0, True),
        ("auto", "cuda", None, True),
        (None, "cpu", None, False),
        (12.5, "cpu", 12.5, False),
        (12.5, "cuda", 12.5, False),
    ],
)
def test_a_bound_that_is_set_is_kept_and_gpus_have_none_by_default(
    value: float | str | None, device: str, bound: float | None, is_default: bool
) -> None:
    config = EngineConfig(model="demo", max_itl_ms=value)
    pacer = make_pacer(config, device, ())
    assert (pacer.bound, pacer.is_default) == (bound, is_default)
