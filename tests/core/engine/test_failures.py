"""Steps, rows, sinks and plugins that fail, on the demo model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from fault_injection import FaultInjector

from headstock.builtin import mixed
from headstock.builtin.eager import EagerRunner
from headstock.config import EngineConfig
from headstock.engine.engine import Engine
from headstock.engine.loop import Loop
from headstock.errors import EngineDied, PluginBroken
from headstock.outputs import Update
from headstock.scheduler.invariants import check_state
from headstock.spi import (
    Budget,
    LayerInfo,
    Runner,
    Sample,
    ScheduleDecision,
    Step,
    View,
)
from headstock_radix_cache.policy import RadixCache
from headstock_sdpa.backend import SdpaBackend

from .demo import SMALL, drain, request, tokens


class Faulty(Runner):
    """Runs as `inner` does, but hurts one step."""

    def __init__(self, inner: Runner, at: int, kind: str) -> None:
        self.inner, self.at, self.kind, self.steps = inner, at, kind, 0

    def run(self, step: Step) -> Sample:
        self.steps += 1
        sample = self.inner.run(step)
        if self.steps != self.at:
            return sample
        if self.kind == "raise":
            raise RuntimeError("the device said no")
        healthy = sample.healthy.clone()
        healthy[1] = False
        return evolve(sample, healthy=healthy)

    def close(self) -> None:
        self.inner.close()


class Answering(EagerRunner):
    """Runs nothing, and gives an answer."""

    def __init__(self, inner: EagerRunner, answer: Any) -> None:
        super().__init__(inner.program)
        self.answer = answer

    def run(self, step: Step) -> Any:
        return self.answer


NO_TOKENS = torch.zeros(0, dtype=torch.int64)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([7], "expected a token for each of 1 rows, got list"),
        (Sample(tokens=NO_TOKENS, healthy=NO_TOKENS.bool()), "of 1 rows, got 0 tokens"),
        (
            Sample(tokens=NO_TOKENS + 0.5, healthy=NO_TOKENS.bool()),
            "as tokens and healthy, got torch.float32 and",
        ),
        (Sample(tokens=torch.zeros(1).long(), healthy=NO_TOKENS.bool()), "[0] healthy flags"),
        (
            Sample(
                tokens=torch.zeros(1).long(),
                healthy=torch.ones(1, dtype=torch.bool),
                order=np.array([1]),
            ),
            "of 1 rows, got an order of 1 among 1 tokens",
        ),
    ],
)
def test_what_a_runner_returns_is_looked_at(engine: Engine, answer: object, said: str) -> None:
    engine.executor.watch = None
    engine.executor.runner = Answering(engine.executor.runner, answer)
    (last,) = drain(engine, request("a"))["a"][-1:]
    assert last.finish_reason == "error" and said in str(last.error)
    assert "test_failures.Answering" in str(last.error)


def test_a_row_with_nan_fails_alone(engine: Engine) -> None:
    requests = [request(str(i), 12, 8) for i in range(4)]
    good = {name: tokens(by_request) for name, by_request in drain(engine, *requests).items()}
    engine.executor.runner = Faulty(engine.executor.runner, 4, "nan")
    by_request = drain(engine, *requests)

    reasons = [by_request[str(i)][-1].finish_reason for i in range(4)]
    assert reasons == ["length", "error", "length", "length"] and by_request["1"][-1].error
    assert {name: tokens(by_request[name]) for name in "023"} == {
        name: good[name] for name in "023"
    }
    assert engine.stats().failed == 1


def test_pages_of_a_row_with_nan_are_finite_when_it_has_ended() -> None:
    engine = Engine(EngineConfig(**SMALL, overlap=False), hooks=FaultInjector.parse(("nan@4:1",)))
    executor: Any = engine.executor
    pools = executor.inner.steps.buffers.pools  # the outer one makes things go wrong
    for name in "ab":
        engine.submit(request(name))
    ended: list[str | None] = []
    while not ended:
        ended += [update.finish_reason for update in engine.step() if update.finish_reason]

    assert ended == ["error"] and all(pool.isfinite().all() for pool in pools)
    engine.close()


def test_a_sick_model_gives_unhealthy_rows(engine: Engine) -> None:
    params = engine.executor.runner.program.params
    with torch.inference_mode():
        params["norm"].tensor.fill_(float("nan"))

    assert drain(engine, request("a"))["a"][-1].finish_reason == "error"


@pytest.mark.feature("G11")
def test_a_step_that_raises_fails_its_requests_and_the_engine_lives(engine: Engine) -> None:
    inner = engine.executor.runner
    engine.executor.runner = Faulty(inner, 3, "raise")
    by_request = drain(engine, request("a"), request("b"))

    assert all(updates[-1].finish_reason == "error" for updates in by_request.values())
    check_state(engine.state, engine.limits)
    assert len(tokens(drain(engine, request("c"))["c"])) == 8


def test_a_step_that_raises_says_where(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    engine.executor.runner = Faulty(engine.executor.runner, 3, "raise")
    drain(engine, request("a"))
    (line,) = (message for message in caplog.messages if "step failed" in message)
    assert f'at="Faulty.run ({__file__}:' in line


def test_a_cache_policy_that_raises_ends_the_engine_and_is_named(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(self: RadixCache, *arguments: Any, **named: Any) -> None:
        raise RuntimeError("no such prefix")

    monkeypatch.setattr(RadixCache, "match_prefix", lost)
    message = rf"scheduling failed in .*lost \({__file__}:\d+\): RuntimeError: no such prefix"
    with pytest.raises(EngineDied, match=message):
        drain(engine, request("a"))


def test_an_attention_that_writes_nothing_is_noticed_when_invariants_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = SdpaBackend.forward

    def forgetful(
        self: SdpaBackend, q: Any, layer: LayerInfo, plan: Any, out: Any, lse: Any = None
    ) -> None:
        forward(self, q, layer, plan, out.clone(), lse)

    monkeypatch.setattr(SdpaBackend, "forward", forgetful)
    engine = Engine(EngineConfig(**SMALL, debug_invariants=True))
    by_request = drain(engine, request("a"), request("b"))
    assert [updates[-1].finish_reason for updates in by_request.values()] == ["error", "error"]
    engine.close()


def test_a_sink_that_raises_loses_its_request_and_disturbs_nobody(engine: Engine) -> None:
    loop = Loop(engine)
    seen: list[Update] = []

    def broken(update: Update) -> None:
        raise ValueError("no")

    loop.submit(request("a", 10, 50), broken)
    loop.submit(request("b", 10, 5), seen.append)
    for _ in range(500):
        if seen and seen[-1].finish_reason:
            break
        loop.thread.join(0.02)
    loop.close()

    assert seen[-1].finish_reason == "length" and not engine.output_tracker.has_request("b")
    with pytest.raises(EngineDied):
        loop.submit(request("c"), seen.append)


def test_a_loop_says_when_the_sinks_have_had_a_step(engine: Engine) -> None:
    seen: list[Update] = []
    batches: list[int] = []
    loop = Loop(engine, after_step=lambda: batches.append(len(seen)))
    loop.submit(request("a", 10, 5), seen.append)
    for _ in range(500):
        if seen and seen[-1].finish_reason:
            break
        loop.thread.join(0.02)
    loop.close()

    assert batches[-1] == len(seen) == 5
    # each token came with a step of its own, and was not reported before it was there
    assert sorted(set(batches)) == [0, 1, 2, 3, 4, 5]


def note_plans(engine: Engine, seen: list[str]) -> None:
    """Have `seen` told of each plan."""
    schedule = engine.limits.schedule

    def planned(view: View, budget: Budget) -> ScheduleDecision:
        seen.append("plan")
        return schedule(view, budget)

    engine.state.limits = evolve(engine.state.limits, schedule=planned)


def test_a_token_is_passed_on_before_the_next_step_is_planned(engine: Engine) -> None:
    seen: list[str] = []

    def sink(update: Update) -> None:
        running = engine.state.num_running
        seen.append(f"{len(update.tokens)} {update.finish_reason} {running}")

    note_plans(engine, seen)
    loop = Loop(engine)
    loop.submit(request("a", 10, 3), sink)
    for _ in range(500):
        if seen and "length" in seen[-1]:
            break
        loop.thread.join(0.02)
    loop.close()

    told = [at for at, each in enumerate(seen) if each != "plan"]
    # Two plans are under way under overlap when the first token is known. The end is told by an
    # engine that has let the request go.
    assert seen[: told[0]].count("plan") == (2 if engine.limits.overlap else 1)
    assert [seen[at] for at in told] == ["1 None 1", "1 None 1", "1 length 0"]


def test_what_passes_tokens_on_is_called_before_the_next_step_is_planned(engine: Engine) -> None:
    seen: list[str] = []
    note_plans(engine, seen)
    loop = Loop(engine, after_step=lambda: seen.append("told"))
    loop.submit(request("a", 10, 3), lambda update: seen.append(update.finish_reason or "token"))
    for _ in range(500):
        if "length" in seen:
            break
        loop.thread.join(0.02)
    loop.close()

    after = [seen[at + 1] for at, each in enumerate(seen[:-1]) if each in ("token", "length")]
    assert after == ["told"] * 3


def test_closing_a_loop_tells_everyone(engine: Engine) -> None:
    loop = Loop(engine)
    seen: list[Update] = []
    loop.submit(request("a", 10, 1000), seen.append)
    loop.close()

    assert seen[-1].finish_reason == "abort"


def test_a_scheduler_that_runs_nothing_is_not_waited_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstock.engine.stall_check._MAX_IDLE_STEPS", 1_000)
    nothing = ScheduleDecision(rows=np.zeros(0, np.int32), counts=np.zeros(0, np.int32))
    engine.state.limits = evolve(engine.state.limits, schedule=lambda view, budget: nothing)
    with pytest.raises(
        PluginBroken, match=r"'mixed' runs nothing, though requests wait.*headstock replay"
    ):
        drain(engine, request("a"))


def test_a_scheduler_that_preempts_what_it_begins_is_not_waited_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstock.engine.stall_check._MAX_IDLE_STEPS", 100)

    def preempt_all(view: View, budget: Budget) -> ScheduleDecision:
        decision = mixed.schedule(view, budget)
        nothing = decision.rows[:0]
        return evolve(decision, rows=nothing, counts=nothing, victims=view.rows_by_priority)

    engine.state.limits = evolve(engine.state.limits, schedule=preempt_all)
    engine.state.limits = evolve(engine.state.limits, max_batch_tokens=8)
    # Its prompt takes several steps, of which it never gets a second one.
    with pytest.raises(
        PluginBroken, match=r"'mixed' ran \d+ steps without a token for any of 1 request; report"
    ):
        drain(engine, request("a", 20))
