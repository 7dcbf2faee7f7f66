"""Planning as late as the device allows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from core.faults.conftest import crash_reports, toys
from hypothesis import given
from hypothesis import strategies as st
from often import often
from toy_engine import EngineHarness, Toys, random_requests, request

from headstock.engine.engine import Engine
from headstock.engine.late_planning import HostTimes, LatePlanner, choose_delay
from headstock.engine.step_clock import StepClock
from headstock.outputs import Update
from headstock.scheduler import Plan

__all__ = ["crash_reports", "toys"]


def plan(decodes: int, *prompts: int) -> Any:
    stops = np.array([*[9] * decodes, *prompts], np.int32)
    starts = np.array([*[8] * decodes, *[0] * len(prompts)], np.int32)
    return SimpleNamespace(num_decode=decodes, rows=stops, starts=starts, stops=stops)


DECODES = plan(2)
PROMPTS = plan(0, 300)
MIXED = plan(1, 300, 100)
SECONDS = st.floats(0.0, 0.1)


@pytest.mark.feature("V10")
@given(
    steps=st.lists(SECONDS, max_size=8),
    leads=st.lists(SECONDS, max_size=16),
    running=st.floats(0.0, 0.2),
)
def test_what_is_left_is_enough_to_plan_and_launch(
    steps: list[float], leads: list[float], running: float
) -> None:
    delay = choose_delay(HostTimes(steps=tuple(steps), leads=tuple(leads)), running)
    assert delay >= 0.0
    if delay:
        assert min(len(steps), len(leads)) >= 4
        assert running + delay + 1.25 * max(leads) + 0.0005 <= 0.951 * min(steps)


@pytest.mark.feature("V10")
def test_a_long_step_is_waited_for_and_a_short_one_is_not() -> None:
    def times(step: float) -> HostTimes:
        return HostTimes(steps=(step,) * 8, leads=(0.0008,) * 8)

    assert choose_delay(times(0.007), 0.0005) == pytest.approx(0.95 * 0.007 - 0.002)
    assert choose_delay(times(0.0025), 0.0004) == 0.0


def test_prompts_are_not_waited_for_where_steps_without_them_are_too_short() -> None:
    times = HostTimes(steps=(0.002,) * 8, by_token=(1e-5,) * 8, leads=(0.0008,) * 8)
    assert choose_delay(times, 0.0, prompt_tokens=1000) == 0.0
    slower = evolve(times, steps=(0.007,) * 8, leads=(*times.leads, 0.006))
    assert choose_delay(slower, 0.0, prompt_tokens=1000) == pytest.approx(
        0.95 * 0.007 + 0.008 - 1.25 * 0.006 - 0.0005
    )
    longer = evolve(times, steps=(0.0027,) * 8)
    assert choose_delay(longer, 0.0, prompt_tokens=1000) == pytest.approx(0.001065 + 0.008)


def test_only_the_last_steps_and_launches_count() -> None:
    times = HostTimes()
    for _ in range(8):
        times = times.add_step(0.001).add_step(0.041, 400).add_lead(0.02)
    for _ in range(8):
        times = times.add_step(0.01).add_lead(0.001)
    for _ in range(8):
        times = times.add_step(0.014, 400)
    assert times.steps == (0.01,) * 8 and times.by_token == (pytest.approx(1e-5),) * 8
    for _ in range(8):
        times = times.add_lead(0.001)
    assert times.leads == (0.001,) * 16


class Host:
    """A host that plans and launches steps of a device, one behind the other, as an engine does.

    Planning takes `plan_s` and launching `launch_s` seconds.
    """

    def __init__(
        self, *, plan_s: float = 0.0005, launch_s: float = 0.0005, **settings: Any
    ) -> None:
        self.now, self.plan_s, self.launch_s = 1.0, plan_s, launch_s
        self.slept, self.ends, self.queue = list[float](), [0.0], list[tuple[Any, float]]()
        self.clock = StepClock(lambda: self.now)
        self.planner = LatePlanner(self.clock, sleep=self.sleep, **{"enabled": True} | settings)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def launch(self, kind: Any, device_s: float) -> None:
        """A step that the device runs behind those that were launched."""
        self.clock.note_launch()
        # Its kernels run as they are launched.
        began, self.now = max(self.now, self.ends[-1]), self.now + self.launch_s
        self.ends.append(max(began + device_s, self.now))
        self.planner.note_launched()
        self.queue.append((kind, self.ends[-1]))

    def collect(self) -> None:
        kind, end = self.queue.pop(0)
        began, self.now = self.now, max(self.now, end)
        self.planner.note_end(kind, self.clock.note_end(), self.now - began)

    def step(self, kind: Any, device_s: float, *, is_urgent: bool = False) -> None:
        """Launch a step, collect the one before, and plan the next one."""
        self.launch(kind, device_s)
        if len(self.queue) > 1:
            self.collect()
        self.planner.wait(self.queue[0][0], is_urgent=is_urgent)
        self.now += self.plan_s


def busy_host(**settings: Any) -> Host:
    """A host that has seen a dozen steps of 10 ms, and waits for none of the next ones yet."""
    host = Host(**settings)
    for _ in range(12):
        host.step(DECODES, 0.01)
    host.slept.clear()
    return host


WAITED = 0.95 * 0.01 - 1.25 * 0.001 - 0.0005
"""Seconds into a step of 10 ms at which planning begins."""


def test_a_step_in_which_rows_decode_is_waited_for_unless_something_is_urgent() -> None:
    host = busy_host()
    for _ in range(5):
        host.step(DECODES, 0.01)
    # The device is never idle: a step begins when the one before ends, not at its launch.
    assert host.slept == [pytest.approx(WAITED, abs=1e-6)] * 5
    host.step(DECODES, 0.01, is_urgent=True)
    host.step(PROMPTS, 0.01)  # collects the last of the others
    host.step(DECODES, 0.01)  # behind prompts alone
    assert len(host.slept) == 6
    off = busy_host(enabled=False)
    off.step(DECODES, 0.01)
    assert off.slept == []


def test_nothing_that_runs_is_not_waited_for() -> None:
    host = busy_host()
    host.planner.wait(None, is_urgent=False)
    assert host.slept == []


def test_a_step_that_is_nearly_over_is_not_waited_for() -> None:
    host = busy_host()
    host.launch(DECODES, 0.01)
    host.collect()
    host.now += 0.008
    host.planner.wait(DECODES, is_urgent=False)
    assert host.slept == []


@pytest.mark.feature("V10")
@pytest.mark.parametrize(
    ("launch", "device", "lead"),
    [
        (0.006, 0.0015, 0.0004),  # launched operation by operation: the host is what bounds a step
        (0.008, 0.007, 0.0005),
        (0.008, 0.012, 0.0005),
        (0.0025, 0.0068, 0.0005),
        (0.0003, 0.0068, 0.0004),  # replayed
    ],
)
@pytest.mark.parametrize("kind", [DECODES, MIXED])
def test_waiting_makes_no_step_longer(launch: float, device: float, lead: float, kind: Any) -> None:
    seconds = {}
    for enabled in (False, True):
        host = Host(plan_s=lead, launch_s=launch, enabled=enabled)
        for number in range(400):
            host.step(DECODES if number < 20 else kind, device)
        seconds[enabled] = host.now - 1.0
        assert enabled or not host.slept
    assert seconds[True] <= 1.01 * seconds[False]
    if launch < 0.001:
        assert len(host.slept) > 300


def test_steps_that_become_shorter_are_waited_for_too_long_once() -> None:
    host = busy_host()
    before = host.now
    for _ in range(40):
        host.step(DECODES, 0.004)
    # The wait behind which the first one had ended, and no other, left the device idle.
    assert host.now - before <= 40 * 0.004 + 0.02
    assert host.slept[-1] == pytest.approx(0.95 * 0.004 - 1.25 * 0.001 - 0.0005, abs=1e-6)


def test_one_longer_launch_is_enough_to_wait_less() -> None:
    host = busy_host()
    host.step(DECODES, 0.01)
    host.launch_s = 0.0012
    host.step(DECODES, 0.01)
    host.launch_s = 0.0005
    host.step(DECODES, 0.01)
    assert host.slept[-1] == pytest.approx(0.95 * 0.01 - 1.25 * 0.0017 - 0.0005, abs=1e-6)


def test_a_lead_is_from_planning_to_its_own_launch() -> None:
    host = Host()
    host.step(DECODES, 0.01)
    host.launch(DECODES, 0.01)
    host.now += 0.5
    host.launch(DECODES, 0.01)  # nothing was planned since
    assert host.planner.times.leads == (pytest.approx(0.001),)


def test_a_step_with_prompts_is_waited_for_by_what_their_tokens_took_before() -> None:
    host = busy_host()
    host.step(MIXED, 0.02)
    host.step(
        MIXED, 0.02
    )  # none was seen when the first is waited for: it takes no less than others
    assert host.slept[1:] == [pytest.approx(WAITED, abs=1e-6)]
    for taken in (0.018, 0.014, 0.018, 0.018):  # 8 or 4 ms more, of 400 tokens
        host.step(MIXED, taken)
    host.slept.clear()
    host.step(MIXED, 0.018)
    host.step(MIXED, 0.018)
    assert host.slept[-1] == pytest.approx(WAITED + 0.8 * 0.004, abs=1e-4)
    assert min(host.planner.times.steps) == pytest.approx(0.01)


@pytest.mark.feature("V10")
def tell_at_once(engine: Engine) -> None:
    """Have the engine's tokens told before the next step is planned, as its loop does."""
    step = engine.step

    def told_step() -> tuple[Update, ...]:
        told: list[Update] = []
        ends = step(told.extend)
        return (*told, *ends)

    engine.step = told_step  # type: ignore[method-assign, assignment]


def test_what_arrives_meanwhile_is_in_the_plan_unless_an_end_is_to_be_told(toys: Toys) -> None:
    engine = toys.engine()
    tell_at_once(engine)
    harness, seen = EngineHarness(engine), list[tuple[bool, bool]]()

    def wait(running: Plan | None, *, is_urgent: bool) -> None:
        seen.append((running is not None, is_urgent))
        if len(seen) == 6:
            harness.submit(request("b", [4, 5, 6], 3))

    engine.late_planner.wait = wait
    harness.submit(request("a", [1, 2, 3], 12))
    for _ in range(6):
        harness.step()
    assert engine.plan is not None and len(engine.plan.rows) == 2
    # While the first step is planned, none is in flight.
    assert seen == [(False, False), *[(True, False)] * 5]
    harness.drain()
    ends = [is_urgent for _, is_urgent in seen[6:]]
    assert sum(ends) == 2
    engine.close()


@pytest.mark.feature("S18", "V10")
@pytest.mark.parametrize("late", often(1, [True, False]))
def test_late_planning_changes_no_token(toys: Toys, late: bool) -> None:
    requests, slept = random_requests(np.random.default_rng(3), 20), list[float]()
    engine = toys.engine(late_planning=late)
    engine.late_planner.sleep = slept.append
    engine.late_planner.times = HostTimes(steps=(10.0,) * 8, leads=(0.001,) * 16)
    engine.late_planner.note_end = lambda plan, seconds, waited: None
    tell_at_once(engine)
    harness = EngineHarness(engine).run(requests)
    engine.close()
    assert bool(slept) == late
    plain = toys.engine(overlap=False)
    wanted = EngineHarness(plain).run(requests)
    plain.close()
    assert (harness.outputs, harness.reasons) == (wanted.outputs, wanted.reasons)


@pytest.mark.parametrize("late", ["an abort", "a request that waits", "tokens", "nothing"])
def test_what_would_be_told_or_freed_later_is_urgent(toys: Toys, late: str) -> None:
    engine = toys.engine(max_running_requests=1)
    seen, updates = list[bool](), list[Update]()
    engine.submit(request("a", [1, 2, 3], 20))
    for _ in range(4):
        engine.step(updates.extend)
    engine.late_planner.wait = lambda running, *, is_urgent: seen.append(is_urgent)
    if late == "a request that waits":
        engine.submit(request("b", [1, 2, 3], 20))
        engine.step(updates.extend)
        seen.clear()
    if late == "an abort":
        engine.abort("a")
    engine.step(None if late == "tokens" else updates.extend)
    assert seen == [late != "nothing"]
    engine.close()


def test_a_step_that_failed_at_its_launch_is_not_waited_for(toys: Toys) -> None:
    engine = toys.engine()
    seen = list[Plan | None]()
    engine.late_planner.wait = lambda running, *, is_urgent: seen.append(running)
    engine.submit(request("a", [1, 2, 3], 20))

    def execute(*arguments: Any) -> Any:
        raise RuntimeError("no")

    engine.executor.execute = execute
    for _ in range(2):
        engine.step(lambda updates: None)
    assert seen == [None, None]
    engine.close()


def test_only_steps_that_were_waited_for_and_in_which_rows_decode_are_timed() -> None:
    host = busy_host(enabled=False)
    before = host.planner.times
    for kind, waited in ((DECODES, 0.0001), (PROMPTS, 0.005)):
        host.planner.note_end(kind, 0.01, waited)
        assert host.planner.times == before
