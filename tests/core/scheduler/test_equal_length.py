"""What `--scheduler equal-length` promises."""

from __future__ import annotations

import numpy as np
import pytest
from attrs import fields
from hypothesis import given, settings
from hypothesis import strategies as st
from often import count_examples
from toy_workloads import limits, prompt, request

from headstock.builtin.equal_length import TURN, schedule
from headstock.spi import Budget, RequestColumns, View
from headstock_conformance.scheduler.toy_device import alone
from headstock_conformance.scheduler.toy_schedule import Drive

RNG = np.random.default_rng(11)


@pytest.mark.feature("T10")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_every_step_has_rows_of_equal_length_and_the_tokens_stay_the_same(
    cached: bool, overlap: bool
) -> None:
    shared = prompt(RNG, 24)
    requests = [
        request(str(i), np.concatenate([shared, prompt(RNG, 1 + i % 5)]), 12) for i in range(12)
    ]
    bounds = limits(scheduler="equal-length", max_batch_tokens=20, overlap=overlap)
    drive = Drive(
        bounds if cached else limits(scheduler="equal-length", max_batch_tokens=20, policy=None)
    )
    for one in requests:
        drive.submit(one)
    drive.drain()

    assert drive.outputs == {one.id: alone(one) for one in requests}
    assert all(len(set(plan.starts.tolist())) <= 1 for plan in drive.plans)
    assert max(len(plan.rows) for plan in drive.plans) > 1, "nothing was ever batched"


@pytest.mark.feature("T10")
def test_equal_prompts_run_as_one_batch() -> None:
    drive = Drive(limits(scheduler="equal-length", policy=None))
    for number in range(6):
        drive.submit(request(str(number), prompt(RNG, 15), 20))
    drive.drain()

    assert sum(len(plan.rows) == 6 for plan in drive.plans) >= 18


@pytest.mark.feature("T10")
def test_shorter_rows_catch_up_and_go_on_with_longer_ones() -> None:
    drive = Drive(limits(scheduler="equal-length", max_rows=16, num_pages=2000, policy=None))
    for _ in range(32):
        drive.submit(request(str(len(drive.outputs)), prompt(RNG, int(RNG.integers(10, 90))), 40))
    drive.drain()

    assert len(drive.plans) < 32 * 40 / 2, (
        "two rows a step on average, though no two begin together"
    )


@pytest.mark.feature("T10")
def test_a_starved_length_is_served_within_a_bounded_number_of_steps() -> None:
    drive = Drive(limits(scheduler="equal-length", num_pages=1000, policy=None))
    drive.submit(request("odd", prompt(RNG, 150), 9))
    for number in range(7):
        drive.submit(request(str(number), prompt(RNG, 3 + 9 * number), 60))
    waited = longest = 0
    while "odd" not in drive.reasons:
        plan = drive.step()
        waited = 0 if 0 in plan.rows else waited + 1  # it was admitted first
        longest = max(longest, waited)

    assert 2 <= longest <= TURN * (8 + 1)


@pytest.mark.feature("T10")
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.booleans())
@settings(max_examples=count_examples(120))
def test_no_row_waits_longer_than_the_bound(seed: int, count: int, arrivals: bool) -> None:
    rng = np.random.default_rng(seed)
    computed = rng.integers(1, 40, count).astype(np.int32)
    last_run = np.zeros(count, np.int32)
    empty = RequestColumns(**{each.name: last_run[:0] for each in fields(RequestColumns)})
    for number in range(1, 200):
        view = View(
            rows_by_priority=np.arange(count, dtype=np.int32),
            num_new_tokens=np.ones(count, np.int32),
            num_computed_tokens=computed,
            num_prompt_tokens=np.ones(count, np.int32),
            last_step=last_run,
            num_drafts=np.zeros(count, np.int32),
            waiting_lengths=np.full(int(arrivals), 9, np.int32),
            waiting_priorities=np.zeros(int(arrivals), np.int32),
            list_running=lambda: empty,
            list_waiting=lambda: empty,
            step=number,
        )
        choice = schedule(view, Budget(tokens=64, free_rows=1, pages=(99,), page_size=4))
        assert len(set(computed[choice.rows].tolist())) <= 1 and not (
            len(choice.rows) and len(choice.admit)
        )
        computed[choice.rows] += choice.counts
        last_run[choice.rows] = number
        assert number - last_run.min() <= TURN * (count + 1)
