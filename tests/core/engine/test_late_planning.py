"""Planning as late as the device allows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from core.faults.conftest import crash_reports, toys
from hypothesis import given
from hypothesis import strategies as st
from toy_engine import EngineHarness, Toys, random_requests, request

from headstock.engine.late_planning import HostTimes, LatePlanner, choose_delay
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
        assert running + delay + 2 * max(leads) + 0.001 <= 0.951 * min(steps)


def test_a_long_step_is_waited_for_and_a_short_one_is_not() -> None:
    def times(step: float) -> HostTimes:
        return HostTimes(steps=(step,) * 8, leads=(0.0005,) * 8)

    assert choose_delay(times(0.007), 0.0005) == pytest.approx(0.95 * 0.007 - 0.0025)
    assert choose_delay(times(0.0025), 0.0002) == 0.0


class Device:
    """Time that passes where it is asked to."""

    def __init__(self) -> None:
        self.now, self.slept = 1.0, list[float]()

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def planner(device: Device, **settings: Any) -> LatePlanner:
    made = LatePlanner(clock=lambda: device.now, sleep=device.sleep, **{"enabled": True} | settings)
    for _ in range(8):  # steps of 10 ms, planned and launched in 0.5 at their beginning
        made.note_launch()
        device.now += 0.0095
        made.note_end(DECODES)
        made.wait(None, is_urgent=False)
        device.now += 0.0005
    made.note_launch()
    return made


def test_only_steps_in_which_rows_decode_are_waited_for() -> None:
    device = Device()
    made = planner(device)
    made.wait(DECODES, is_urgent=True)
    made.wait(PROMPTS, is_urgent=False)
    made.wait(None, is_urgent=False)
    assert device.slept == []
    made.wait(DECODES, is_urgent=False)
    assert device.slept == [pytest.approx(0.95 * 0.0095 - 2 * 0.0005 - 0.001)]
    off = planner(device, enabled=False)
    off.wait(DECODES, is_urgent=False)
    assert len(device.slept) == 1


def test_a_step_that_is_nearly_over_is_not_waited_for() -> None:
    device = Device()
    made = planner(device)
    device.now += 0.008
    made.wait(DECODES, is_urgent=False)
    assert device.slept == []


def test_one_shorter_step_or_longer_launch_is_enough_to_wait_less() -> None:
    device = Device()
    made = planner(device)
    made.times = made.times.add_step(0.004)
    made.wait(DECODES, is_urgent=False)
    assert device.slept == [pytest.approx(0.95 * 0.004 - 0.002)]
    device.now += 0.003
    made.note_launch()
    made.note_end(DECODES)
    assert max(made.times.leads) == pytest.approx(0.003)


def test_what_arrives_meanwhile_is_in_the_plan_unless_an_end_is_to_be_told(toys: Toys) -> None:
    engine = toys.engine()
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


@pytest.mark.feature("S18")
@pytest.mark.parametrize("late", [True, False])
def test_late_planning_changes_no_token(toys: Toys, late: bool) -> None:
    requests, slept = random_requests(np.random.default_rng(3), 20), list[float]()
    engine = toys.engine(late_planning=late)
    engine.late_planner.sleep = slept.append
    engine.late_planner.times = HostTimes(steps=(10.0,) * 8, leads=(0.001,) * 16)
    engine.late_planner.note_end = lambda plan: engine.late_planner.launched.popleft()
    harness = EngineHarness(engine).run(requests)
    engine.close()
    assert bool(slept) == late
    plain = toys.engine(overlap=False)
    wanted = EngineHarness(plain).run(requests)
    plain.close()
    assert (harness.outputs, harness.reasons) == (wanted.outputs, wanted.reasons)


def test_a_step_with_prompts_is_waited_for_by_what_their_tokens_took_before() -> None:
    device = Device()
    made = planner(device)
    made.wait(MIXED, is_urgent=False)  # no step with prompts was seen: it takes no less than others
    decoding = 0.95 * 0.0095 - 2 * 0.0005 - 0.001
    assert device.slept == [pytest.approx(decoding)]
    for taken in (0.0175, 0.0135, 0.0175, 0.0175):  # 8 or 4 ms more, of 400 tokens
        made.times = made.times.add_step(taken, 400)
    device.now = made.launched[-1]
    made.wait(MIXED, is_urgent=False)
    assert device.slept[1:] == [pytest.approx(decoding + 0.8 * 0.004)]


def test_steps_that_end_are_timed_by_their_kind() -> None:
    device = Device()
    made = planner(device)
    for kind, taken in ((MIXED, 0.0135), (PROMPTS, 0.03), (DECODES, 0.009)):
        device.now += taken
        made.note_end(kind)
        made.note_launch()
    assert made.times.by_token == (pytest.approx(0.004 / 400),)
    assert made.times.steps[-2:] == (pytest.approx(0.0095), pytest.approx(0.009))
