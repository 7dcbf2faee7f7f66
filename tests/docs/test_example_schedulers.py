"""What the schedulers of docs/examples promise."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from source_tree import ROOT
from toy_workloads import limits, prompt, random_requests, request

from headstock.builtin import mixed
from headstock.spi import Budget, ScheduleDecision, ScheduleFunction, View
from headstock_conformance.scheduler.toy_device import alone
from headstock_conformance.scheduler.toy_schedule import Drive

FAIR, SHORTEST = "headstock_fair_share", "headstock_shortest_job"
PATIENCE_MS, TOKENS_PER_SECOND = 2_000, 50
"""As the examples have them."""


@pytest.fixture(scope="module", autouse=True)
def examples() -> Iterator[None]:
    """The packages of the examples can be imported."""
    names = ("fair-share", "shortest-job")
    paths = [str(ROOT / "docs" / "examples" / f"{name}-plugin" / "src") for name in names]
    sys.path[:0] = paths
    yield
    for path in paths:
        sys.path.remove(path)


def schedule_of(package: str) -> ScheduleFunction:
    """The scheduler of an example."""
    function: ScheduleFunction = import_module(f"{package}.schedule").schedule
    return function


@pytest.mark.parametrize("package", [FAIR, SHORTEST])
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=6)
def test_every_request_ends_with_its_tokens(package: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tick, pages = int(rng.choice([0, 1, 500])), int(rng.choice([45, 60, 200]))
    bounds = limits(
        schedule=schedule_of(package),
        num_pages=pages,
        max_rows=int(rng.integers(1, 9)),
        overlap=bool(rng.random() < 0.5),
    )
    drive = Drive(bounds, rng if rng.random() < 0.3 else None, tick, picks_victims=True)
    requests = random_requests(rng)
    for one in requests:
        drive.submit(one)
        drive.step()
    drive.drain(4_000)
    for one in requests:
        assert drive.outputs[one.id] == alone(one)


def judge_shares(view: View, budget: Budget, decision: ScheduleDecision) -> None:
    """Check that nobody gets more than another who wants more than he gets."""
    users = view.list_running().users
    wanted, given_ = Counter[int](), Counter[int]()
    for row in view.rows_by_priority.tolist():
        wanted[int(users[row])] += int(view.num_new_tokens[row])
    for row, count in zip(decision.rows.tolist(), decision.counts.tolist(), strict=True):
        given_[int(users[row])] += count
    short = [user for user in wanted if given_[user] < wanted[user]]
    most = max(given_.values(), default=0)
    assert all(given_[user] >= most - 1 for user in short), f"{given_} of {wanted}"
    assert sum(given_.values()) == min(budget.tokens, sum(wanted.values())), "tokens are left over"


@pytest.mark.feature("R1")
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=6)
def test_users_of_unequal_demand_get_equal_shares(seed: int) -> None:
    rng = np.random.default_rng(seed)
    fair = schedule_of(FAIR)

    def judged(view: View, budget: Budget) -> ScheduleDecision:
        decision = fair(view, budget)
        # What is kept for admitted requests is no row's yet.
        if not len(decision.admit) and not len(decision.victims):
            judge_shares(view, budget, decision)
        return decision

    rows, budget = int(rng.choice([2, 4, 8])), int(rng.choice([8, 17, 64]))
    longest = int(rng.integers(4, 100))
    shares = []
    for schedule in (judged, mixed.schedule):
        drive = Drive(
            limits(schedule=schedule, max_rows=rows, num_pages=400, max_batch_tokens=budget)
        )
        # Ada sends four times as many requests of like lengths, and sends them first.
        lengths = rng.integers(1, longest // 2 + 1, (2, 50)).tolist()
        for number, (length, most) in enumerate(zip(*lengths, strict=True)):
            user = "ada" if number < 40 else "bob"
            drive.submit(request(str(number), prompt(rng, length), most, user=user))
        tokens: Counter[str] = Counter()
        while True:
            plan = drive.step()
            if len({each.request.user for each in drive.state.waiting}) < 2:
                break
            counts = (plan.stops - plan.starts).tolist()
            for row, count in zip(plan.rows.tolist(), counts, strict=True):
                entry = drive.state.requests_by_row[row]
                assert entry is not None
                tokens[entry.request.user] += count
            if schedule is judged:
                # One user's rows may be further on than the other's, and an admitted prompt
                # may take a step.
                unequal = abs(tokens["ada"] - tokens["bob"])
                assert unequal <= rows * longest + 2 * budget
        shares.append(tokens["bob"] / tokens.total())
    assert shares[0] > 0 == shares[1], "it serves in the order of arrival"


@pytest.mark.parametrize("tick", [0, 100])
def test_a_user_without_a_row_gets_one_when_his_patience_ends(tick: int) -> None:
    drive = Drive(limits(schedule=schedule_of(FAIR), max_rows=4, num_pages=200), tick=tick)
    rng = np.random.default_rng(3)
    for number in range(6):
        drive.submit(request(f"ada {number}", prompt(rng, 5), 120, user="ada"))
    for _ in range(3):
        drive.step()
    drive.submit(request("bob", prompt(rng, 5), 3, user="bob"))
    began = len(drive.plans)
    while not drive.outputs["bob"]:
        drive.step()
    waited = len(drive.plans) - began
    drive.drain()

    if tick:
        assert PATIENCE_MS // tick <= waited <= PATIENCE_MS // tick + 4
        assert drive.state.num_preempted == 1
    else:
        assert waited > 100 and drive.state.num_preempted == 0


def test_nobody_gives_way_to_a_second_row_or_to_a_lower_priority() -> None:
    for users, priority in ((("ada", "bob"), 0), (("ada", "ada"), -1)):
        drive = Drive(limits(schedule=schedule_of(FAIR), max_rows=2), tick=1_000)
        for number, user in enumerate(users):
            drive.submit(request(str(number), [1, 2], 60, user=user))
        drive.step()
        newcomer = "bob" if priority == 0 else "eve"
        drive.submit(request("new", [1, 2], 60, user=newcomer, priority=priority))
        drive.drain()
        assert drive.state.num_preempted == 0


def test_the_shortest_request_goes_first() -> None:
    rng = np.random.default_rng(1)
    drive = Drive(limits(schedule=schedule_of(SHORTEST), max_rows=1))
    work = {}
    for number in range(20):
        length, most = rng.integers(1, 50, 2).tolist()
        work[str(number)] = length + most
        drive.submit(request(str(number), prompt(rng, length), most))
    drive.drain()
    assert list(drive.reasons) == sorted(work, key=lambda id: work[id])


@given(seed=st.integers(0, 2**32 - 1), tick=st.sampled_from([0, 50, 1_000]))
@settings(max_examples=6)
def test_tokens_and_rows_go_to_the_least_work_that_is_left(seed: int, tick: int) -> None:
    rng = np.random.default_rng(seed)
    shortest = schedule_of(SHORTEST)

    def judged(view: View, budget: Budget) -> ScheduleDecision:
        decision = shortest(view, budget)
        running, waiting = view.list_running(), view.list_waiting()
        work = [
            each.num_prompt_tokens + each.max_tokens - each.waits * TOKENS_PER_SECOND / 1_000
            for each in (running, waiting)
        ]
        left = work[0] - view.num_computed_tokens
        chosen = set(decision.admit.tolist())
        others = set(range(len(work[1]))) - chosen
        if chosen and others:
            assert max(work[1][[*chosen]]) <= min(work[1][[*others]])
        # A row that gets fewer tokens than it can compute has most left of those that get any.
        counts = dict(zip(decision.rows.tolist(), decision.counts.tolist(), strict=True))
        for row in view.rows_by_priority.tolist():
            if counts.get(row, 0) < view.num_new_tokens[row]:
                assert all(left[other] <= left[row] for other in counts)
        return decision

    bounds = limits(schedule=judged, max_rows=3, max_batch_tokens=16, overlap=seed % 2 == 0)
    drive = Drive(bounds, tick=tick)
    for one in random_requests(rng):
        drive.submit(evolve(one, priority=0))
        if rng.random() < 0.3:
            drive.step()
    drive.drain(4_000)


@pytest.mark.feature("R1")
@pytest.mark.parametrize("tick", [0, 100])
def test_a_long_request_ages_by_the_clock_until_it_goes_before_short_ones(tick: int) -> None:
    drive = Drive(limits(schedule=schedule_of(SHORTEST), max_rows=1), tick=tick)
    drive.submit(request("first", [1, 2], 2))
    drive.step()
    drive.submit(request("long", list(range(40)), 60))
    for number in range(150):  # a short one is always there
        drive.submit(request(str(number), [1, 2], 1))
        drive.step()
    # 100 tokens are aged away in 2 seconds, 20 steps.
    assert bool(drive.outputs["long"]) == bool(tick)
    drive.drain()
    assert len(drive.reasons) == 152
