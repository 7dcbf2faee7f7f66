"""The clock of a step, and what schedulers see of requests: waits, users, adapters, the queue."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from often import count_examples
from toy_workloads import limits, prompt, random_requests, request, to_pooling

from headstock.builtin import mixed
from headstock.errors import PluginBroken
from headstock.scheduler import Aborted, Arrived, Clock, RowCounter, initial_state, step
from headstock.scheduler.name_table import NameTable
from headstock.scheduler.row_counters import NUM_COUNTERS, count_waits, wrap_milliseconds
from headstock.spi import Budget, RequestColumns, ScheduleDecision, View
from headstock_conformance.scheduler.toy_device import alone
from headstock_conformance.scheduler.toy_schedule import Drive

RNG = np.random.default_rng(11)


class Shown:
    """A scheduler that keeps what it was shown of the rows and of the queue."""

    def __init__(self) -> None:
        self.running: list[RequestColumns] = []
        self.waiting: list[RequestColumns] = []

    def schedule(self, view: View, budget: Budget) -> ScheduleDecision:
        self.running.append(view.list_running())
        self.waiting.append(view.list_waiting())
        return mixed.schedule(view, budget)


@pytest.mark.feature("R1")
def test_waits_are_counted_by_the_clock_from_the_step_of_the_arrival() -> None:
    shown = Shown()
    bounds = limits(schedule=shown.schedule, max_rows=1)
    state = initial_state(bounds)
    arrivals = [Arrived(request(name, prompt(RNG, 4), 9)) for name in "ab"]
    for events in ([Clock(1000), arrivals[0]], [Clock(1005), arrivals[1]], [Clock(1250)], []):
        step(state, events)

    # A step without a clock has the time of the one before.
    assert [each.waits.tolist() for each in shown.running] == [[0], [5], [250], [250]]
    assert [each.waits.tolist() for each in shown.waiting] == [[0], [0], [245], [245]]


def test_a_preempted_request_has_waited_since_it_came() -> None:
    shown = Shown()
    drive = Drive(limits(schedule=shown.schedule, max_rows=1), tick=100)
    drive.submit(request("low", prompt(RNG, 4), 9, user="ada"))
    drive.step()
    drive.step()
    drive.submit(request("high", prompt(RNG, 4), 2, priority=1))
    drive.step()

    assert drive.state.num_preempted == 1
    drive.step()
    columns = shown.waiting[-1]
    assert columns.waits.tolist() == [300] and columns.users.tolist() == [1]
    assert (columns.lengths.tolist(), columns.num_prompt_tokens.tolist()) == ([6], [4])
    drive.drain()
    assert drive.state.users.numbers == {}


@pytest.mark.parametrize("began", [0, 2**31 - 5, 2**32 - 5, 5 * 2**32 + 17])
def test_the_clock_of_a_row_wraps_around_and_its_waits_do_not(began: int) -> None:
    counters = np.zeros((NUM_COUNTERS, 3), np.int32)
    counters[RowCounter.ACTIVE, :2] = 1
    counters[RowCounter.ARRIVED_AT, :2] = [
        wrap_milliseconds(began),
        wrap_milliseconds(began + 100),
    ]
    assert count_waits(counters, began + 110).tolist() == [110, 10, 0]


def test_names_have_small_numbers_while_a_request_has_them() -> None:
    table = NameTable()
    assert [table.add(name) for name in ("ada", "bob", "ada", "", "eve")] == [1, 2, 1, 0, 3]
    table.drop("bob")
    table.drop("ada")
    assert [table.add(name) for name in ("ida", "ada", "joe")] == [2, 1, 4]
    for name in ("ada", "ada", "ida", "eve", "joe", ""):
        table.drop(name)
    assert (table.numbers, table.counts, sorted(table.free)) == ({}, {}, [1, 2, 3, 4])


@pytest.mark.feature("R1")
def test_users_and_adapters_are_told_apart_in_rows_and_queue() -> None:
    shown = Shown()
    bounds = limits(schedule=shown.schedule, max_rows=3)
    drive = Drive(bounds)
    for number, (user, adapter) in enumerate([("ada", ""), ("bob", "x"), ("", "y"), ("bob", "y")]):
        drive.submit(request(str(number), prompt(RNG, 4), 3 + number, user=user, adapter=adapter))
    drive.step()
    drive.step()

    running, waiting = shown.running[-1], shown.waiting[-1]
    assert (running.users.tolist(), running.adapters.tolist()) == ([1, 2, 0], [0, 1, 2])
    assert (waiting.users.tolist(), waiting.adapters.tolist()) == ([2], [2])
    assert (running.max_tokens.tolist(), waiting.max_tokens.tolist()) == ([3, 4, 5], [6])
    for array in (running.users, running.waits, running.max_tokens, waiting.waits, waiting.users):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 1
    drive.events.append(Aborted("3"))
    drive.drain()
    assert drive.state.users.numbers == drive.state.adapters.numbers == {}


def test_a_free_row_asks_for_nothing() -> None:
    shown = Shown()
    drive = Drive(limits(schedule=shown.schedule, max_rows=4), tick=5)
    drive.submit(request("0", prompt(RNG, 4), 3, user="ada"))
    for _ in range(2):
        drive.step()
    for name in RequestColumns.__annotations__:
        assert getattr(shown.running[-1], name)[1:].tolist() == [0, 0, 0], name


def test_any_request_of_the_queue_may_be_admitted() -> None:
    def last_first(view: View, budget: Budget) -> ScheduleDecision:
        decision = mixed.schedule(view, budget)
        last = len(view.list_waiting().lengths) - 1
        admit = [last] if last >= 0 and budget.free_rows else []
        return evolve(decision, admit=np.array(admit, np.int32))

    drive = Drive(limits(schedule=last_first, max_rows=1))
    for number in range(300):  # more than a part of the queue holds
        drive.submit(request(str(number), [number % 50, 3], 1))
    drive.drain()
    assert list(drive.reasons) == [str(number) for number in range(299, -1, -1)]


@pytest.mark.parametrize("position", [2, 300])
def test_a_position_behind_the_queue_is_refused(position: int) -> None:
    def schedule(view: View, budget: Budget) -> ScheduleDecision:
        none = np.zeros(0, np.int32)
        return ScheduleDecision(rows=none, counts=none, admit=np.array([position], np.int32))

    drive = Drive(limits(schedule=schedule, max_rows=1))
    for name in "ab":
        drive.submit(request(name, [1, 2]))
    with pytest.raises(PluginBroken, match="waiting positions that are not in ascending order"):
        drive.step()


@pytest.mark.parametrize("contiguous", [False, True])
def test_adapters_share_no_prefix(contiguous: bool) -> None:
    tokens = prompt(RNG, 13)
    names: list[dict[str, str]] = [
        {},
        {"adapter": "x"},
        {"adapter": "y"},
        {"adapter": "x", "namespace": "z"},
        {"namespace": "\0001:x"},
        {"namespace": "\0001:xz"},
        {"namespace": "x"},
    ]
    changes: dict[str, Any] = (
        {"policy": None, "max_regions": 8, "page_size": 160, "num_pages": 8} if contiguous else {}
    )
    cached = []
    drive = Drive(limits(max_rows=1, **changes))
    # The second time each goes on where the first one ended, as a region must.
    longer = np.append(tokens, [*alone(request("x", tokens, 3)), 1, 2]).astype(np.int32)
    for turn, asked in enumerate((tokens, longer)):
        for number, each in enumerate(names):
            drive.submit(request(f"{turn}.{number}", asked, 3, **each))
            drive.drain()
            cached.append(drive.state.ended[0].cached)
    assert cached[: len(names)] == [0] * len(names), "a prefix of another adapter was taken"
    assert all(count >= 8 for count in cached[len(names) :])


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=count_examples(12))
def test_looking_changes_nothing(seed: int) -> None:
    plans = []
    for schedule in (mixed.schedule, Shown().schedule):
        rng = np.random.default_rng(seed)
        drive = Drive(limits(schedule=schedule, num_pages=60), tick=int(rng.integers(0, 3)))
        requests = random_requests(rng)
        for one in requests:
            drive.submit(one)
            drive.step()
        drive.drain(3_000)
        plans.append([plan.encode() for plan in drive.plans])
        for one in requests:
            assert drive.outputs[one.id] == alone(one)
    assert plans[0] == plans[1]


def test_a_request_that_pools_asks_for_no_tokens_wherever_it_is() -> None:
    shown = Shown()
    drive = Drive(limits(schedule=shown.schedule, max_rows=1, max_batch_tokens=8))
    for number in range(2):
        drive.submit(to_pooling(request(str(number), prompt(RNG, 20), 1), "last"))
    drive.step()
    drive.step()

    assert shown.running[-1].max_tokens.tolist() == [0]
    assert shown.waiting[-1].max_tokens.tolist() == [0]
    drive.drain()
