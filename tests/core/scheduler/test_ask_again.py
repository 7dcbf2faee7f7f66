"""A scheduler that idles on purpose says when it is to be asked again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from toy_workloads import limits, prompt, request
from windowed import WINDOW_MS, Options, make_schedule

from headstock.builtin import mixed
from headstock.engine.stall_check import StallCheck
from headstock.errors import PluginBroken
from headstock.scheduler.selection import MAX_ASK_AGAIN_MS
from headstock.spi import Budget, ScheduleDecision, View
from headstock.spi.scheduler import no_rows
from headstock_conformance.scheduler.toy_device import alone
from headstock_conformance.scheduler.toy_schedule import Drive


def make_requests(count: int, **changes: Any) -> list[Any]:
    rng = np.random.default_rng(4)
    return [request(f"{i}", prompt(rng, 12), **changes) for i in range(count)]


def test_requests_are_admitted_in_batches_for_a_minute() -> None:
    drive = Drive(limits(schedule=make_schedule(Options(window_ms=500))), tick=1)
    requests = make_requests(300, max_tokens=2)
    sizes = []
    for start in range(0, len(requests), 2):
        before = len(drive.plans)
        for one in requests[start : start + 2]:
            drive.submit(one)
            drive.step()
        drive.drain()
        sizes.append(max(len(plan.new_row_ids) for plan in drive.plans[before:]))
    assert {one.id: drive.outputs[one.id] for one in requests} == {
        one.id: alone(one) for one in requests
    }
    assert sizes == [2] * 150
    assert 60_000 < drive.waited < 150 * 500, "a window begins with its first request"


def idle(**fields: Any) -> Any:
    """A scheduler that runs nothing and says so."""

    def schedule(view: View, budget: Budget) -> ScheduleDecision:
        return ScheduleDecision(rows=no_rows(), counts=no_rows(), **fields)

    return schedule


@pytest.mark.parametrize(
    ("asked", "milliseconds"),
    [(1, 1), (np.int32(250), 250), (MAX_ASK_AGAIN_MS, 10_000), (10**9, 10_000), (2**63, 10_000)],
)
def test_the_wait_counts_from_the_clock_of_the_step_and_is_capped(
    asked: Any, milliseconds: int
) -> None:
    drive = Drive(limits(schedule=idle(ask_again_ms=asked)), tick=7)
    drive.submit(make_requests(1)[0])
    for _ in range(3):
        drive.step()
        assert drive.state.next_ask == drive.state.milliseconds + milliseconds


def test_a_scheduler_that_asks_for_no_wait_is_asked_at_once() -> None:
    drive = Drive(limits(schedule=idle()), tick=7)
    drive.submit(make_requests(1)[0])
    drive.step()
    assert drive.state.next_ask == 0


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, "200", np.float32(3)])
def test_a_wait_that_is_none_is_refused_by_name(wrong: Any) -> None:
    drive = Drive(limits(schedule=idle(ask_again_ms=wrong)))
    drive.submit(make_requests(1)[0])
    with pytest.raises(PluginBroken, match=r"'mixed' chose ask_again_ms: expected .* got "):
        drive.step()


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 3))
def test_a_scheduler_with_windows_gives_the_same_tokens(gaps: list[bool], least: int) -> None:
    drive = Drive(limits(schedule=make_schedule(Options(least=least))), tick=3)
    requests = make_requests(len(gaps))
    for one, has_gap in zip(requests, gaps, strict=True):
        drive.submit(one)
        for _ in range(9 if has_gap else 0):
            drive.step()
    drive.drain()
    assert {one.id: drive.outputs[one.id] for one in requests} == {
        one.id: alone(one) for one in requests
    }


def test_steps_before_the_wait_is_over_count_for_no_stall() -> None:
    drive = Drive(limits(schedule=mixed.schedule))
    drive.submit(make_requests(1)[0])
    state = evolve(drive.state, milliseconds=5, next_ask=5 + WINDOW_MS)
    check = StallCheck("windowed")

    def count(milliseconds: int, next_ask: int) -> str | None:
        now = evolve(state, milliseconds=milliseconds, next_ask=next_ask)
        return check.find_stall(now, has_work=True, is_idle=True)

    for start in range(5, 5 + 300 * WINDOW_MS, WINDOW_MS):  # a minute of windows
        for early in range(50):
            assert count(start + early, start + WINDOW_MS) is None
    assert check.num_idle_steps == 300, "each wait is one step"
    for _ in range(10_000):
        stall = count(10**6, 0)
    assert stall is not None and "'windowed' runs nothing" in stall
