"""What goes wrong on demand goes wrong where it was asked for, and nowhere else."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import patience
import pytest
from fault_injection import FaultInjector, InjectedFault
from often import often
from toy_engine import EngineHarness, Toys, random_requests, request

from headstock import SamplingParams
from headstock.config import EngineConfig
from headstock.engine.engine import Engine
from headstock.engine.loop import Loop
from headstock.errors import CannotRun, EngineDied
from headstock.spi import (
    CaptureProgress,
    Program,
    ReplayLimits,
    ReplaySizes,
    Runner,
    Sample,
    Step,
)

SAMPLED = SamplingParams(temperature=0.0, frequency_penalty=0.1)  # not judged as the toy model is
PROGRAM = cast("Program", SimpleNamespace())
RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(0, 50, 20 + i) for i in range(4)]


@pytest.fixture(params=[True, False], ids=["overlap", "in turn"])
def overlap(request: pytest.FixtureRequest) -> bool:
    """Whether planning and computing overlap."""
    return bool(request.param)


def faulty(toys: Toys, *faults: str, **settings: Any) -> EngineHarness:
    """Four requests on an engine with these faults, drained; whoever ends well has said what it
    says alone.
    """
    harness = EngineHarness(toys.engine(faults=faults, **settings))
    harness.run(request(str(i), prompt, 12) for i, prompt in enumerate(PROMPTS))
    again = EngineHarness(harness.engine).run([request("after", PROMPTS[0], 12)])
    harness.engine.close()
    assert again.reasons == {"after": "length"}, "the engine did not live on"
    return harness


def test_a_row_of_nan_fails_alone_and_is_counted(toys: Toys, overlap: bool) -> None:
    harness = faulty(toys, "nan@4:2", overlap=overlap)

    assert harness.reasons == {"0": "length", "1": "length", "2": "error", "3": "length"}, (
        "a row did not fail alone"
    )
    assert 0 < len(harness.outputs["2"]) < 12 and harness.engine.stats().failed == 1


@pytest.mark.parametrize("stage", ["execute", "wait"])
def test_a_step_that_raises_fails_its_rows_and_nobody_who_waits(
    toys: Toys, overlap: bool, stage: str
) -> None:
    harness = faulty(toys, f"{stage}@5", overlap=overlap, max_running_requests=2)

    assert harness.reasons == {"0": "error", "1": "error", "2": "length", "3": "length"}
    assert harness.engine.stats().failed == 2


def test_a_scheduler_that_raises_ends_the_engine_and_everyone_is_told(
    toys: Toys, overlap: bool
) -> None:
    loop = Loop(toys.engine(faults=("schedule@4",), overlap=overlap))
    updates: list[Any] = []
    loop.submit(request("a", PROMPTS[0], 12), updates.append)
    loop.thread.join(patience.seconds)

    assert (
        updates[-1].finish_reason == "error"
        and "InjectedFault" in updates[-1].error
        and "headstock replay" in updates[-1].error
    )
    with pytest.raises(
        EngineDied, match="the engine stopped: the scheduler 'mixed' raised InjectedFault"
    ):
        loop.submit(request("b", PROMPTS[0], 12), updates.append)
    loop.close()
    loop.engine.close()


def test_a_slow_step_delays_and_changes_nothing(toys: Toys, overlap: bool) -> None:
    started = time.perf_counter()
    harness = faulty(toys, "slow@3:0.3", overlap=overlap)

    assert time.perf_counter() - started > 0.3 and set(harness.reasons.values()) == {"length"}


def test_no_memory_for_the_pool_says_how_much_was_wanted(toys: Toys) -> None:
    with pytest.raises(
        CannotRun,
        match=r"the KV pool needs .*KiB of .*GiB that were free.*num_pages \(--num-pages\)",
    ):
        toys.engine(faults=("allocate",))


def test_a_capture_fails_once() -> None:
    class Capturing(Runner):
        """Captures five bytes."""

        def __init__(self) -> None: ...

        def run(self, step: Step) -> Sample:
            raise NotImplementedError

        def prepare(self, limits: ReplayLimits, report: CaptureProgress) -> ReplaySizes:
            asked.append(limits)
            return ReplaySizes(rows=(limits.max_rows,) if limits.max_rows else ())

        def close(self) -> None: ...

    asked: list[ReplayLimits] = []
    runner = FaultInjector.parse(["capture"]).wrap_runner(Capturing(), PROGRAM)
    limits = ReplayLimits(max_rows=8)

    assert runner.prepare(ReplayLimits(), print) == ReplaySizes()
    with pytest.raises(InjectedFault, match="capture"):
        runner.prepare(limits, print)
    assert asked[-1] == ReplayLimits()
    assert runner.prepare(limits, print) == ReplaySizes(rows=(8,))


def test_without_faults_the_parts_stay_as_they_are() -> None:
    faults = FaultInjector.parse([])
    parts = [object() for _ in range(4)]
    around = [
        lambda runner: faults.wrap_runner(runner, PROGRAM),
        faults.wrap_executor,
        faults.wrap_scheduler,
        faults.wrap_allocation,
    ]

    assert [wrap(part) for wrap, part in zip(around, parts, strict=True)] == parts  # type: ignore[operator,arg-type]


@pytest.mark.parametrize(
    "text", ["nan@3", "nan", "execute", "slow@2", "explode@3", "nan@-1:2", "allocate@3"]
)
def test_a_fault_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no fault"):
        FaultInjector.parse((text,))


@pytest.mark.parametrize("seed", often(1, [1, 0, 2, 3, 4, 5]))
def test_many_faults_in_a_random_mix_hurt_only_whom_they_hit(
    toys: Toys, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    rng = np.random.default_rng(seed)
    kinds = ("nan@{}:{}", "execute@{}", "wait@{}")[: None if seed % 2 else 1]
    faults = [
        str(rng.choice(kinds)).format(rng.integers(1, 60), rng.integers(0, 6)) for _ in range(6)
    ]
    harness = EngineHarness(
        toys.engine(faults=faults, num_pages=70, max_running_requests=6, debug_canary=True)
    )
    harness.run(random_requests(rng, 40, greedy=True))
    harness.engine.close()
    failed = sum(reason == "error" for reason in harness.reasons.values())

    assert 0 < failed == harness.engine.stats().failed
    assert failed <= sum(1 if fault.startswith("nan") else 6 for fault in faults), (
        "a row did not fail alone"
    )
    assert set(harness.reasons.values()) == {"stop", "length", "error"}


def test_a_prefix_computed_with_nan_is_found_by_nobody() -> None:
    engine = Engine(
        EngineConfig(num_pages=64, max_batch_tokens=32, max_running_requests=4),
        hooks=FaultInjector.parse(("nan@0:0",)),
    )
    prompt = np.random.default_rng(1).integers(5, 500, 100)
    first = EngineHarness(engine).run([request("a", prompt, 4, params=SAMPLED)])
    hit = EngineHarness(engine).run([request("b", prompt, 4, params=SAMPLED)])
    engine.reset_prefix_cache()
    fresh = EngineHarness(engine).run([request("c", prompt, 4, params=SAMPLED)])
    engine.close()

    assert first.reasons == {"a": "error"}, "NaN of a chunk was not noticed"
    end = hit.reasons["b"], hit.outputs["b"]
    assert end == (fresh.reasons["c"], fresh.outputs["c"]), "NaN of a chunk was found"


class Counting(Runner):
    """Runs nothing, and counts."""

    def __init__(self) -> None:
        self.runs = 0

    def close(self) -> None: ...

    def run(self, step: Step) -> Any:
        self.runs += 1

    def prepare(self, limits: ReplayLimits, report: CaptureProgress) -> ReplaySizes:
        return ReplaySizes(rows=(limits.max_rows,) if limits.max_rows else ())


def test_what_a_start_tries_is_no_step() -> None:
    faults = FaultInjector.parse(("execute@0", "nan@0:0", "capture"))
    inner = Counting()
    runner = faults.wrap_runner(inner, PROGRAM)
    runner.run(cast("Step", None))

    assert inner.runs == 1 and len(faults.pending) == 3
    with pytest.raises(InjectedFault, match="capture"):
        runner.prepare(ReplayLimits(max_rows=1), lambda done, total: None)
    faults.step = 0
    with pytest.raises(InjectedFault, match="execute@0"):
        runner.run(cast("Step", None))


def test_faults_that_never_happened_are_named_at_the_end(
    toys: Toys, caplog: pytest.LogCaptureFixture
) -> None:
    # The eager runner captures nothing.
    faulty(toys, "nan@0:77", "slow@3:0.01", "capture", "wait@100000", overlap=False)
    (line,) = [record.getMessage() for record in caplog.records if "never" in record.getMessage()]

    assert line == 'event="faults never happened" faults="nan@0:77 capture wait@100000"'
