"""What a scheduler chooses, and what it may not."""

from __future__ import annotations

import numpy as np
import pytest
from toy_workloads import SCHEDULERS, limits, prompt, request

from headstock.errors import PluginBroken
from headstock.spi import Budget, ScheduleDecision, View
from headstock_conformance.scheduler.toy_device import alone
from headstock_conformance.scheduler.toy_schedule import Drive, run

SEED = 7
RNG = np.random.default_rng(SEED)


@pytest.mark.feature("H15")
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_decode_rows_are_never_starved_by_prefill(scheduler: str) -> None:
    drive = Drive(limits(scheduler=scheduler, max_batch_tokens=16, max_rows=6, num_pages=2000))
    drive.submit(request("steady", prompt(RNG, 4), 100))
    drive.step()
    waits, waited = [], 0
    for number in range(200):
        if number % 2 == 0:
            drive.submit(request(str(number), prompt(RNG, 60), 2))
        if "steady" in drive.reasons:
            break
        before = len(drive.outputs["steady"])
        drive.step()
        waited = 0 if len(drive.outputs["steady"]) > before else waited + 1
        waits.append(waited)

    assert max(waits) <= (28 if scheduler == "equal-length" else 6)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_prompts_are_never_starved_by_decode_rows(scheduler: str) -> None:
    drive = Drive(limits(scheduler=scheduler, max_rows=4))
    for number in range(3):
        drive.submit(request(f"old{number}", prompt(RNG, 4), 120))
    for _ in range(4):
        drive.step()
    drive.submit(request("new", prompt(RNG, 20), 2))
    for _ in range(12):
        drive.step()

    assert drive.outputs["new"], f"{scheduler} left a prompt waiting for 12 steps"


@pytest.mark.feature("I17", "I18")
def test_higher_priority_goes_first_then_first_come() -> None:
    drive = Drive(limits(max_rows=1))
    for name, priority in (("a", 0), ("b", 0), ("c", 1), ("d", 1)):
        drive.submit(request(name, prompt(RNG, 5), 3, priority=priority))
    drive.drain()

    assert list(drive.reasons) == ["c", "d", "a", "b"]


def test_a_waiting_request_of_higher_priority_takes_a_seat() -> None:
    drive = Drive(limits(max_rows=1))
    low = request("low", prompt(RNG, 9), 30)
    drive.submit(low)
    for _ in range(5):
        drive.step()
    drive.submit(request("high", prompt(RNG, 9), 3, priority=5))
    drive.drain()

    assert list(drive.reasons) == ["high", "low"] and drive.outputs["low"] == alone(low)


def test_victims_are_of_lower_priority_and_the_oldest_is_never_preempted() -> None:
    drive = Drive(limits(num_pages=45, max_rows=6))
    requests = [request(str(i), prompt(RNG, 20), 100) for i in range(6)]
    for one in requests:
        drive.submit(one)
    while drive.busy:
        drive.step()
        for entry in drive.state.waiting:
            older = [
                running
                for running in drive.state.requests_by_row
                if running is not None and running.priority_key > entry.priority_key
            ]
            assert not older or not entry.preemptions or not drive.state.num_running, (
                "preempted for a younger one"
            )
        entries = [
            entry
            for entry in (*drive.state.waiting, *drive.state.requests_by_row)
            if entry is not None
        ]
        assert not any(entry.preemptions for entry in entries if entry.request.id == "0"), (
            "the older one was preempted"
        )

    assert drive.state.num_preempted > 0
    assert drive.outputs == {one.id: alone(one) for one in requests}


ILLEGAL = {
    "rows but": lambda view: ScheduleDecision(
        rows=view.rows_by_priority, counts=np.zeros(0, np.int32)
    ),
    "does not exist": lambda view: ScheduleDecision(rows=np.array([99]), counts=np.array([1])),
    "twice": lambda view: ScheduleDecision(rows=np.array([0, 0]), counts=np.array([1, 1])),
    "fewer new tokens": lambda view: ScheduleDecision(
        rows=view.rows_by_priority, counts=view.num_new_tokens[view.rows_by_priority] + 1
    ),
    "waiting positions": lambda view: ScheduleDecision(
        rows=view.rows_by_priority[:0], counts=view.num_new_tokens[:0], admit=np.array([5])
    ),
    "victim": lambda view: ScheduleDecision(
        rows=view.rows_by_priority[:0], counts=view.num_new_tokens[:0], victims=np.array([7])
    ),
}


@pytest.mark.parametrize("fault", ILLEGAL)
def test_an_illegal_decision_is_an_error_that_names_the_scheduler(fault: str) -> None:
    def schedule(view: View, budget: Budget) -> ScheduleDecision:
        if not len(view.rows_by_priority):
            return ScheduleDecision(
                rows=view.rows_by_priority,
                counts=view.rows_by_priority,
                admit=np.arange(len(view.waiting_lengths)),
            )
        return ILLEGAL[fault](view)

    drive = Drive(limits(schedule=schedule, scheduler="mixed"))
    drive.submit(request("a", prompt(RNG, 8), 5))
    drive.step()
    with pytest.raises(PluginBroken, match=f"'mixed' chose .*{fault}"):
        drive.step()


def test_victims_that_a_scheduler_names_are_preempted_and_finish_later() -> None:
    calls = []

    def schedule(view: View, budget: Budget) -> ScheduleDecision:
        calls.append(1)
        if len(calls) == 6:
            return ScheduleDecision(
                rows=view.rows_by_priority[:1],
                counts=view.num_new_tokens[view.rows_by_priority[:1]],
                victims=view.rows_by_priority[1:],
            )
        return SCHEDULERS["mixed"](view, budget)

    drive = Drive(limits(schedule=schedule))
    requests = [request(str(i), prompt(RNG, 8), 12) for i in range(3)]
    run(drive, *requests)

    assert drive.state.num_preempted == 2
    assert drive.outputs == {one.id: alone(one) for one in requests}


def test_a_scheduler_that_runs_the_lowest_priority_alone_cannot_stall_a_full_pool() -> None:
    def schedule(view: View, budget: Budget) -> ScheduleDecision:
        rows = (
            view.rows_by_priority[-1:]
            if view.num_new_tokens[view.rows_by_priority[-1:]].any()
            else view.rows_by_priority[:0]
        )
        admit = np.arange(len(view.waiting_lengths))
        return ScheduleDecision(
            rows=rows, counts=np.minimum(view.num_new_tokens[rows], budget.tokens), admit=admit
        )

    requests = [request(str(i), prompt(RNG, 30), 40) for i in range(3)]
    drive = Drive(limits(schedule=schedule, num_pages=20, policy=None))
    for one in requests:
        drive.submit(one)
    drive.drain(500)

    assert drive.state.num_preempted > 0 and drive.outputs == {
        one.id: alone(one) for one in requests
    }


@pytest.mark.parametrize("name", ["rows", "counts", "admit", "victims"])
def test_positions_that_are_fractions_are_refused_by_name(name: str) -> None:
    def schedule(view: View, budget: Budget) -> ScheduleDecision:
        none = np.zeros(0, np.int32)
        decision = {"rows": none, "counts": none, "admit": none, "victims": none}
        return ScheduleDecision(**decision | {name: np.array([0.0])})

    drive = Drive(limits(schedule=schedule))
    drive.submit(request("0", prompt(RNG, 4), 3))
    with pytest.raises(PluginBroken, match=f"{name}: expected int32, got float64|1 rows but 0"):
        drive.step()
