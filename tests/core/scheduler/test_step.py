"""What one step, or a few, must do."""

from __future__ import annotations

import numpy as np
import pytest
from attrs import astuple
from toy_workloads import FULL, limits, prompt, request, window

from headstock.builtin import mixed
from headstock.scheduler import Outcome, Plan, initial_state, step
from headstock.scheduler.invariants import check_state
from headstock.spi import Budget, ScheduleDecision, View
from headstock_conformance.scheduler.toy_device import alone, next_token
from headstock_conformance.scheduler.toy_schedule import Drive, run

SEED = 7
RNG = np.random.default_rng(SEED)


@pytest.mark.feature("T1")
@pytest.mark.parametrize("cap", [1, 3, 8])
def test_never_more_rows_than_seats_and_all_finish(cap: int) -> None:
    drive = Drive(limits(max_rows=cap))
    requests = [request(str(i), prompt(RNG, 5 + i), 6) for i in range(20)]
    for one in requests:
        drive.submit(one)
    while drive.busy:
        drive.step()
        assert drive.state.num_running <= cap

    assert drive.outputs == {one.id: alone(one) for one in requests}


@pytest.mark.feature("T6")
def test_a_full_pool_preempts_and_the_output_stays_the_same() -> None:
    requests = [request(str(i), prompt(RNG, 30), 60) for i in range(6)]
    roomy = run(Drive(limits(num_pages=400)), *requests)
    tight = run(Drive(limits(num_pages=30)), *requests)

    assert roomy.state.num_preempted == 0 and tight.state.num_preempted > 0
    assert tight.outputs == roomy.outputs


@pytest.mark.feature("T7")
def test_a_new_request_joins_while_others_decode() -> None:
    drive = Drive(limits())
    drive.submit(request("a", prompt(RNG, 8), 30))
    for _ in range(5):
        drive.step()
    drive.submit(request("b", prompt(RNG, 12), 5))
    plan = drive.step()

    assert plan.num_decode == 1 and (plan.stops - plan.starts).tolist() == [1, 12]


@pytest.mark.feature("T14")
def test_recomputing_everything_gives_the_same_tokens_without_hits() -> None:
    requests = [request(str(i), prompt(RNG, 10 + i), 12) for i in range(4)]
    drive = Drive(limits(policy=None, recompute=True))
    for one in requests:
        drive.submit(one)
    drive.step()
    plan = drive.step()

    assert plan.starts.tolist() == [0, 0, 0, 0]
    drive.drain()
    assert drive.outputs == {one.id: alone(one) for one in requests}


@pytest.mark.feature("P10", "S6")
@pytest.mark.parametrize("budget", [1, 2, 7, 16, 100])
def test_a_long_prompt_is_cut_into_chunks_that_partition_it(budget: int) -> None:
    one = request("a", prompt(RNG, 90), 8)
    drive = run(Drive(limits(max_batch_tokens=budget, max_rows=1)), one)
    spans = [
        (int(s), int(t))
        for plan in drive.plans
        for s, t in zip(plan.starts, plan.stops, strict=True)
    ]

    assert [start for start, _ in spans[1:]] == [stop for _, stop in spans[:-1]] and spans[0][
        0
    ] == 0
    assert all(plan.num_tokens <= budget for plan in drive.plans)
    assert drive.outputs["a"] == alone(one)


def test_what_a_step_gave_out_stays_as_it_was_when_the_next_one_runs() -> None:
    drive = Drive(limits(num_pages=30))
    for number in range(5):
        drive.submit(request(str(number), prompt(RNG, 20), 6 + number))
    kept: list[tuple[Plan, bytes, Outcome, str]] = []
    while drive.busy:
        plan, outcome = drive.step(), drive.state.outcome
        kept.append((plan, plan.encode(), outcome, repr(astuple(outcome))))
    assert len(kept) > 10
    for plan, encoded, outcome, text in kept:
        assert plan.encode() == encoded and repr(astuple(outcome)) == text


def test_a_scheduler_cannot_write_the_state() -> None:
    views: list[View] = []

    def schedule(view: View, budget: Budget) -> ScheduleDecision:
        views.append(view)
        return mixed.schedule(view, budget)

    drive = Drive(limits(schedule=schedule))
    drive.submit(request("a", prompt(RNG, 20), 4))
    drive.drain()
    for view in views:
        for values in (view.rows_by_priority, view.num_new_tokens, view.num_computed_tokens):
            with pytest.raises(ValueError, match="read-only"):
                values[:] = 1


def test_plans_survive_encoding_and_nonsense_does_not_decode() -> None:
    drive = Drive(limits())
    drive.submit(request("a", prompt(RNG, 20), 5))
    plan = drive.step()
    again = Plan.decode(plan.encode())

    assert again.encode() == plan.encode() and again.new_row_ids.tolist() == [0]
    with pytest.raises(ValueError, match="not an encoded plan"):
        Plan.decode(plan.encode()[:-4])


@pytest.mark.parametrize("reuse", [False, True])
def test_a_window_group_frees_what_lies_behind_its_window(reuse: bool) -> None:
    changes = {} if reuse else {"policy": None}
    bounds = limits(groups=(FULL, window(10)), num_pages=40, **changes)
    drive = Drive(bounds)
    one = request("a", prompt(RNG, 50), 60)
    drive.submit(one)
    most = 0
    while drive.busy:
        drive.step()
        most = max(most, len(drive.state.pages[1][0]))

    assert drive.outputs["a"] == alone(one)
    assert len(drive.plans) > 50 and most <= 13 + 1
    cached = bounds.policy.count_evictable(drive.state.index, 1) if bounds.policy else 0
    assert drive.state.num_free[1] + cached == 40 and (cached > 20) is reuse


def test_scored_prompts_ignore_hits_and_score_every_position_once() -> None:
    tokens = prompt(RNG, 30)
    drive = run(Drive(limits(max_batch_tokens=8)), request("a", tokens, 2))
    first = len(drive.plans)
    run(drive, request("b", tokens, 2, prompt_logprobs=True))
    scored = sum(
        int(plan.num_logits[0])
        for plan in drive.plans[first:]
        if len(plan.rows) and plan.starts[0] < 30
    )

    assert scored == 30


def test_a_fresh_state_is_sound_and_idle_steps_do_nothing() -> None:
    bounds = limits()
    state = initial_state(bounds)
    plan = step(state, ())
    check_state(state, bounds)

    assert not len(plan.rows) and plan.num_tokens == 0
    assert next_token([1, 2]) != next_token([2, 1])
