"""Tokens that are known a step late, or only guessed."""

from __future__ import annotations

import numpy as np
import pytest
from toy_workloads import FULL, SCHEDULERS, limits, prompt, request, window

from headstock.spi import Budget, KVGroup, ScheduleDecision, View
from headstock_conformance.scheduler.toy_device import alone
from headstock_conformance.scheduler.toy_schedule import Drive, run

SEED = 7
RNG = np.random.default_rng(SEED)


@pytest.mark.feature("S18")
def test_overlap_gives_the_same_tokens_and_wastes_at_most_a_step_a_request() -> None:
    requests = [
        request(str(i), prompt(RNG, 5 + i % 40), 30, stop_ids=(i % 7, 7 + i % 9), priority=i % 2)
        for i in range(48)
    ]
    plain = run(Drive(limits(num_pages=70)), *requests)
    overlapped = run(Drive(limits(num_pages=70, overlap=True)), *requests)

    assert overlapped.outputs == plain.outputs == {one.id: alone(one) for one in requests}
    assert overlapped.state.num_preempted > 0
    roomy = [
        run(Drive(limits(num_pages=800, overlap=overlap)), *requests) for overlap in (False, True)
    ]
    computed = [sum(plan.num_tokens for plan in drive.plans) for drive in roomy]
    assert not any(drive.state.num_preempted for drive in roomy)
    assert computed[0] < computed[1] <= computed[0] + len(requests)


@pytest.mark.feature("S18")
def test_the_next_plan_is_made_before_the_last_token_is_known() -> None:
    drive = Drive(limits(overlap=True))
    drive.submit(request("a", prompt(RNG, 6), 8))
    first, second = drive.step(), drive.step()

    assert (first.starts.tolist(), first.stops.tolist()) == ([0], [6])
    assert (second.starts.tolist(), second.stops.tolist()) == ([6], [7]) and not drive.outputs["a"]


def test_a_fenced_row_waits_for_its_token_and_others_go_on() -> None:
    drive = Drive(limits(overlap=True))
    drive.submit(request("wait_for_sample", prompt(RNG, 6), 8, wait_for_sample=True))
    drive.submit(request("free", prompt(RNG, 6), 8))
    plans = [drive.step() for _ in range(6)]

    assert [len(plan.rows) for plan in plans] == [2, 1, 2, 1, 2, 1]
    drive.drain()
    assert drive.outputs["wait_for_sample"] == alone(
        request("x", drive.device.requests[0].prompt, 8)
    )


@pytest.mark.parametrize("groups", [(FULL,), (FULL, window(3))], ids=["full", "window"])
@pytest.mark.parametrize("overlap", [True, False])
def test_drafts_change_nothing_but_the_number_of_steps(
    groups: tuple[KVGroup, ...], overlap: bool
) -> None:
    bounds = limits(groups=groups, page_size=1, num_pages=400, overlap=overlap)
    requests = [request(str(i), prompt(RNG, 10), 40) for i in range(4)]
    plain = run(Drive(bounds), *requests)
    drafted = run(Drive(bounds, np.random.default_rng(3)), *requests)

    assert drafted.outputs == plain.outputs == {one.id: alone(one) for one in requests}, (
        "wrong tokens"
    )
    # Under overlap a row sits out while its drafts are verified, so there may be more steps.
    runs = [sum(len(plan.rows) for plan in drive.plans) for drive in (drafted, plain)]
    assert runs[0] < runs[1]
    assert overlap or len(drafted.plans) < len(plain.plans)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_that_runs_nothing_loses_no_page_table_entry(overlap: bool) -> None:
    def schedule(view: View, budget: Budget) -> ScheduleDecision:
        rests = view.step % 2
        return (
            ScheduleDecision(rows=view.rows_by_priority[:0], counts=view.rows_by_priority[:0])
            if rests
            else SCHEDULERS["mixed"](view, budget)
        )

    tokens = prompt(RNG, 40)  # equal tokens end up on the same pages
    requests = [request(str(i), tokens, 5 + 5 * i) for i in range(12)]
    drive = run(Drive(limits(schedule=schedule, num_pages=200, overlap=overlap)), *requests)

    assert drive.outputs == {one.id: alone(one) for one in requests}, "wrong tokens"
