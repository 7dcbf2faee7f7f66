"""Where chunks of prompts end in models whose states may be cut at some places alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from toy_workloads import FULL, STATE, limits, prompt, request

from headstock.scheduler import Limits, Plan, RowCounter
from headstock.spi import Budget, ScheduleDecision, View
from headstock_conformance.scheduler.toy_device import alone
from headstock_conformance.scheduler.toy_schedule import Drive, run
from headstock_radix_cache.policy import RadixCache


def make(snapshots: bool = False, **changes: Any) -> Limits:
    """Limits of a model whose chunks end at multiples of 8."""
    groups = (FULL, STATE)
    sizes: dict[str, Any] = {"max_rows": 3, "max_batch_tokens": 30, "num_pages": (60, 9)}
    if snapshots:
        sizes |= {"policy": RadixCache(4, groups), "snapshot_tokens": 24}
    return limits(**{"groups": groups, "alignment": 8, **sizes, **changes})


def list_spans(plans: list[Plan], row: int = 0) -> list[tuple[int, int]]:
    """The chunks of a row."""
    return [
        (int(plan.starts[at]), int(plan.stops[at]))
        for plan in plans
        for at in np.flatnonzero(plan.rows == row).tolist()
    ]


def test_chunks_end_at_multiples_and_the_last_one_at_the_prompts_end() -> None:
    rng = np.random.default_rng(0)
    drive = run(Drive(make()), request("a", prompt(rng, 61), 3))

    assert list_spans(drive.plans) == [(0, 24), (24, 48), (48, 61), (61, 62), (62, 63)]


def test_states_are_saved_amid_steps_which_they_do_not_cut() -> None:
    rng = np.random.default_rng(0)
    bounds = make(snapshots=True, snapshot_tokens=40, max_batch_tokens=64)
    first = prompt(rng, 150)
    drive = run(Drive(bounds), request("a", first, 1))

    # The last multiple before the prompt's end is 144, too near to 120 for a state of its own.
    assert list_spans(drive.plans) == [(0, 64), (64, 128), (128, 150)]
    saved = [[count for _, _, count, _ in plan.saves.tolist()] for plan in drive.plans[:3]]
    assert saved == [[40], [80, 120], []]
    # Another prompt goes on behind the longest of them that it begins with.
    other = np.concatenate((first[:100], prompt(rng, 20)))
    drive = run(drive, request("b", other, 1))
    assert list_spans(drive.plans)[3:] == [(80, 120)]
    assert drive.outputs["b"] == alone(request("b", other, 1))


def test_an_answer_is_computed_again_without_a_whole_block_in_a_chunk() -> None:
    rng = np.random.default_rng(1)
    drive = Drive(make(num_pages=(14, 3), max_rows=2, max_batch_tokens=64))
    run(drive, request("a", prompt(rng, 9), 30), request("b", prompt(rng, 9), 40))

    assert drive.state.num_preempted
    again = [span for row in range(2) for span in list_spans(drive.plans, row) if span[0] >= 9]
    blocks = [span for span in again if span[1] - -(-span[0] // 8) * 8 >= 8]
    assert any(stop - start > 1 for start, stop in again) and not blocks


def test_a_scheduler_that_gives_each_row_a_few_tokens_stops_none() -> None:
    def divide(view: View, budget: Budget) -> ScheduleDecision:
        rows = view.rows_by_priority[view.num_new_tokens[view.rows_by_priority] > 0]
        counts = np.minimum(view.num_new_tokens[rows], 3)
        admit = np.arange(min(len(view.waiting_lengths), 1), dtype=np.int32)
        return ScheduleDecision(rows=rows, counts=counts.astype(np.int32), admit=admit)

    rng = np.random.default_rng(2)
    drive = Drive(make(schedule=divide))
    run(drive, *(request(name, prompt(rng, 50), 9) for name in "abc"))

    assert set(drive.reasons.values()) == {"length"}
    for row in range(3):
        assert all(stop % 8 == 0 or stop >= 50 for _, stop in list_spans(drive.plans, row))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_row_that_is_preempted_goes_on_from_the_copy_of_its_answers_state(overlap: bool) -> None:
    rng = np.random.default_rng(3)
    drive = Drive(make(snapshots=True, max_rows=1, num_pages=(60, 4), overlap=overlap))
    drive.submit(request("low", prompt(rng, 20), 40))
    while int(drive.state.row_counters[RowCounter.NUM_COMPUTED, 0]) < 45:
        drive.step()
    run(drive, request("high", prompt(rng, 9), 3, priority=1))

    assert drive.state.num_preempted == 1
    (again,) = [plan for plan in drive.plans[20:] if len(plan.new_row_ids) and plan.starts[0]]
    assert again.starts.tolist() == [40]


@pytest.mark.parametrize("overlap", [False, True])
def test_copies_leave_the_pages_of_drafts_to_requests_that_may_come(overlap: bool) -> None:
    rng = np.random.default_rng(0)
    # Room for the states of three rows with three drafts each, and for two copies.
    sizes = {"max_rows": 3, "max_batch_tokens": 200, "num_pages": (120, 14), "max_drafts": 3}
    drive = Drive(make(snapshots=True, snapshot_tokens=8, overlap=overlap, **sizes))
    requests = [request("a", prompt(rng, 120), 9)]
    requests += [request(name, prompt(rng, 60), 9) for name in "bc"]
    drive.submit(requests[0])
    drive.step()
    run(drive, *requests[1:])

    assert drive.outputs == {one.id: alone(one) for one in requests}


def test_copies_leave_a_page_to_each_request_that_may_come() -> None:
    rng = np.random.default_rng(5)
    drive = Drive(make(snapshots=True, max_rows=2, num_pages=(60, 2)))
    drive.submit(request("a", prompt(rng, 20), 40))
    while int(drive.state.row_counters[RowCounter.NUM_COMPUTED, 0]) < 45:
        drive.step()
    run(drive, request("b", prompt(rng, 9), 3))

    assert drive.reasons == {"a": "length", "b": "length"} and not drive.state.num_preempted
