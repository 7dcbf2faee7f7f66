"""KV groups with page counts of their own: windows and states beside full attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import evolve
from toy_workloads import FULL, STATE, limits, prompt, request, window

from headstock.scheduler import Failed, Limits, find_refusal
from headstock.scheduler.limits import max_total_pages
from headstock.spi import KVGroup
from headstock_conformance.scheduler.toy_device import alone
from headstock_conformance.scheduler.toy_schedule import Drive, run

RNG = np.random.default_rng(5)


def count_for_all(group: KVGroup, bounds: Limits) -> int:
    """The pages with which the group never runs out."""
    return max_total_pages(
        group,
        page_tokens=bounds.page_tokens[1],
        max_rows=bounds.max_rows,
        max_batch_tokens=bounds.max_batch_tokens,
        max_len=bounds.max_len,
    )


def with_pages(beside: KVGroup, count: int, **changes: Any) -> Limits:
    """Limits of a full group with 100 pages, and another beside it with `count`."""
    return limits(**{"groups": (FULL, beside), "num_pages": (100, count), **changes})


@pytest.mark.parametrize("overlap", [True, False])
def test_rows_with_a_window_never_preempt_each_other_for_its_pages(overlap: bool) -> None:
    """24 pages are what one prompt takes while it is computed; at rest a window takes 3."""
    bounds = with_pages(window(8), 24, overlap=overlap)
    requests = [request(str(i), prompt(RNG, 60), 20) for i in range(6)]
    drive = run(Drive(bounds), *requests)

    assert drive.outputs == {one.id: alone(one) for one in requests}
    assert drive.state.num_preempted == 0, "a row was preempted"


@pytest.mark.parametrize("overlap", [True, False])
def test_a_window_with_pages_for_all_rows_holds_none_back(overlap: bool) -> None:
    bounds = with_pages(window(8), 1, overlap=overlap, max_batch_tokens=30, num_pages=(400, 1))
    most = count_for_all(window(8), bounds)
    bounds = evolve(bounds, num_pages=(400, most))
    requests = [request(str(i), prompt(RNG, 60), 60) for i in range(bounds.max_rows)]
    drive, running, held = Drive(bounds), 0, 0
    for one in requests:
        drive.submit(one)
    while drive.busy:
        drive.step()
        running = max(running, drive.state.num_running)
        held = max(held, np.count_nonzero(drive.state.refs[1]))

    assert bounds.scarce_groups == () and running == bounds.max_rows == 8
    assert 8 * 2 < held <= most and most < 8 * 40, "the bound is no bound, or is far too wide"
    assert drive.outputs == {one.id: alone(one) for one in requests}
    assert drive.state.num_preempted == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_a_state_is_one_page_and_as_many_rows_run(overlap: bool) -> None:
    bounds = with_pages(STATE, 3, overlap=overlap)
    requests = [request(str(i), prompt(RNG, 20), 30) for i in range(7)]
    drive, most = Drive(bounds), 0
    for one in requests:
        drive.submit(one)
    while drive.busy:
        drive.step()
        most = max(most, drive.state.num_running)
        assert all(len(pages) <= 1 for pages in drive.state.pages[1])

    assert bounds.page_tokens == (4, bounds.max_len) and most == 3
    assert drive.outputs == {one.id: alone(one) for one in requests}
    assert drive.state.num_preempted == 0 and drive.state.num_free == [100, 3]


def test_a_row_goes_on_from_the_state_behind_its_last_right_draft() -> None:
    bounds = with_pages(STATE, 8)
    requests = [request(str(i), prompt(RNG, 10), 40, wait_for_sample=True) for i in range(3)]
    drafted = run(Drive(bounds, np.random.default_rng(3)), *requests)
    plain = run(Drive(bounds), *requests)

    assert drafted.outputs == plain.outputs == {one.id: alone(one) for one in requests}
    # No step is spent on what a rejected draft spoiled, and no state is copied.
    tokens = [plan.num_tokens - int(plan.num_drafts.sum()) for plan in drafted.plans]
    assert sum(tokens) < sum(plan.num_tokens for plan in plain.plans)
    assert len(tokens) < len(plain.plans)
    assert not any(len(plan.copies) for plan in drafted.plans)


def test_a_state_that_was_preempted_or_failed_begins_anew() -> None:
    bounds = limits(groups=(FULL, STATE), num_pages=(30, 4), max_rows=4)
    requests = [request(str(i), prompt(RNG, 30), 40) for i in range(5)]
    drive = Drive(bounds)
    for one in requests:
        drive.submit(one)
    for _ in range(6):
        plan = drive.step()
    drive.events.append(Failed(plan.rows[:1], plan.admission_ids[:1]))
    drive.drain()

    failed = [name for name, reason in drive.reasons.items() if reason == "error"]
    assert len(failed) == 1 and drive.state.num_preempted > 0
    for one in requests:
        if one.id not in failed:
            assert drive.outputs[one.id] == alone(one)


@pytest.mark.parametrize(("beside", "count"), [(window(8), 23), (STATE, 0)])
def test_a_request_that_one_group_can_never_hold_is_refused(beside: KVGroup, count: int) -> None:
    one = request("a", prompt(RNG, 100), 40)

    refusal = find_refusal(one, with_pages(beside, count))
    assert refusal is not None and f"but the pool has {count};" in refusal
    assert find_refusal(one, with_pages(beside, count + 1)) is None


def test_pressure_is_that_of_the_group_with_least_room() -> None:
    bounds = with_pages(window(8), 24)

    assert bounds.scarce_groups == (0, 1)
    assert bounds.pages_by_group(100).tolist() == [25, 7]
    assert bounds.largest_share(np.array([25, 7])) == 7 / 24
    assert bounds.largest_share(np.array([75, 7])) == 0.75
    roomy = with_pages(window(8), 500)
    assert roomy.scarce_groups == (0,)
    assert roomy.largest_share(np.array([25, 400])) == 0.25
