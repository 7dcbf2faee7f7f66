"""The bound on prompt tokens of steps that have decode rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from often import count_examples
from toy_workloads import limits, prompt, random_limits, random_requests, request

from headstock.scheduler import Paced, RowCounter
from headstock_conformance.scheduler.toy_device import alone
from headstock_conformance.scheduler.toy_schedule import Drive


def prompt_tokens(drive: Drive) -> list[tuple[int, int]]:
    """Decode rows and prompt tokens of each step."""
    return [
        (plan.num_decode, int((plan.stops - plan.starts)[plan.num_decode :].sum()))
        for plan in drive.plans
    ]


@pytest.mark.feature("V1")
def test_a_prompt_beside_decode_rows_is_cut_and_one_alone_is_not() -> None:
    rng = np.random.default_rng(1)
    drive = Drive(limits(max_batch_tokens=64))
    drive.events.append(Paced(8))
    drive.submit(request("first", prompt(rng, 40), 12))
    drive.step()
    drive.submit(request("second", prompt(rng, 30), 2))
    drive.drain()
    steps = prompt_tokens(drive)
    assert steps[0] == (0, 40)
    assert [tokens for decode, tokens in steps if decode and tokens] == [8, 8, 8, 6]


def test_a_later_bound_replaces_an_earlier_one() -> None:
    rng = np.random.default_rng(1)
    drive = Drive(limits(max_batch_tokens=64))
    drive.submit(request("first", prompt(rng, 4), 12))
    drive.step()
    drive.submit(request("second", prompt(rng, 30), 2))
    for bound in (8, 4, 16):
        drive.events.append(Paced(bound))
        drive.step()
    assert prompt_tokens(drive)[-3:] == [(1, 8), (1, 4), (1, 16)]


@pytest.mark.feature("V1")
@pytest.mark.parametrize("scheduler", ["mixed", "decode-first"])
@settings(max_examples=count_examples(16))
@given(seed=st.integers(0, 2**32 - 1))
def test_no_step_has_more_and_every_request_ends_with_its_tokens(scheduler: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    drive = Drive(random_limits(rng, scheduler))
    requests = random_requests(rng)
    bound = int(rng.integers(1, 20))
    drive.events.append(Paced(bound))
    for one in requests:
        drive.submit(one)
    while drive.busy:
        plan = drive.step()
        # Not by the plan: the one token that is left of a prompt is no decode row that waits.
        counters = drive.state.row_counters.take(plan.rows, axis=1)
        known = counters[RowCounter.NUM_KNOWN] - 1
        is_prompt = plan.starts < np.maximum(counters[RowCounter.NUM_PROMPT], known)
        counts = plan.stops - plan.starts
        # Drafts and rows that give way to others leave their share of the step to prompts.
        is_exact = not drive.limits.max_drafts and not drive.state.num_preempted
        most = max(bound, drive.limits.alignment)
        assert is_prompt.all() or not is_exact or counts[is_prompt].sum() <= most
    assert drive.outputs == {one.id: alone(one) for one in requests}


def run_beside(
    bound: Paced, lengths: list[int], *, priorities: list[int] | None = None, **changes: Any
) -> dict[str, int]:
    """The step in which each request got its row: one decodes, the others come together."""
    rng = np.random.default_rng(3)
    settings = {"max_batch_tokens": 64, "max_rows": 16, "num_pages": 500, "max_len": 256}
    drive = Drive(limits(**(settings | changes)))
    drive.submit(request("stream", prompt(rng, 4), 40))
    drive.step()
    drive.events.append(bound)
    for number, length in enumerate(lengths):
        one = request(str(number), prompt(rng, length), 1)
        drive.submit(evolve(one, priority=priorities[number] if priorities else 0))
    admitted: dict[str, int] = {}
    for count in range(400):
        drive.step()
        for entry in drive.state.requests_by_row:
            if entry is not None:
                admitted.setdefault(entry.request.id, count)
        if not drive.busy:
            break
    assert not drive.busy
    return admitted


@pytest.mark.feature("V1")
def test_a_short_prompt_goes_ahead_of_long_ones_in_bounded_steps() -> None:
    lengths = [100] * 6 + [8]
    bounded = run_beside(Paced(16), lengths)
    assert bounded["6"] == 1 < bounded["2"]
    assert [bounded[str(each)] for each in range(6)] == sorted(bounded[str(e)] for e in range(6))
    # Steps that nobody bounded keep the order of the queue.
    free = run_beside(Paced(64), lengths)
    assert free["6"] >= free["5"]
    # As does a prompt that takes more than half of what a step has for prompts.
    longer = run_beside(Paced(16), [100] * 6 + [9])
    assert longer["6"] >= longer["5"]


def test_many_short_prompts_fill_bounded_steps() -> None:
    rng = np.random.default_rng(3)
    drive = Drive(limits(max_batch_tokens=64, max_rows=40, num_pages=500, max_len=120))
    drive.submit(request("stream", prompt(rng, 4), 60))
    drive.step()
    drive.events.append(Paced(16))
    for number in range(30):
        drive.submit(request(str(number), prompt(rng, 6), 1))
    drive.drain()
    # 180 tokens, 16 a step.
    assert sum(tokens > 0 for _, tokens in prompt_tokens(drive)[1:]) <= 13


def test_a_short_prompt_of_a_lower_priority_keeps_its_place() -> None:
    admitted = run_beside(Paced(16), [100, 100, 8, 8], priorities=[1, 1, 0, 1])
    assert admitted["3"] < admitted["1"] < admitted["2"]


def test_prompts_that_fill_their_steps_let_short_ones_ahead() -> None:
    # No prompt is left within a step, so that none has a row when the next one is planned.
    admitted = run_beside(Paced(16), [16] * 20 + [8])
    assert admitted["20"] <= 3 and admitted["19"] > 15


def test_short_prompts_do_not_starve_a_long_one() -> None:
    rng = np.random.default_rng(3)
    for rows, pages in ((16, 500), (16, 34)):
        drive = Drive(limits(max_batch_tokens=64, max_rows=rows, num_pages=pages, max_len=120))
        drive.events.append(Paced(16, every_step=True))
        drive.submit(request("stream", prompt(rng, 4), 100))
        drive.submit(request("long", prompt(rng, 100), 1))
        for number in range(60):
            for part in "ab":
                drive.submit(request(f"{number}{part}", prompt(rng, 8), 6))
            drive.step()
            if drive.reasons.get("long"):
                break
        assert drive.reasons.get("long") == "length", (rows, pages)


def test_a_bound_of_every_step_holds_without_decode_rows() -> None:
    rng = np.random.default_rng(1)
    for bound, first in ((Paced(8), 40), (Paced(8, every_step=True), 8)):
        drive = Drive(limits(max_batch_tokens=64))
        drive.events.append(bound)
        drive.submit(request("first", prompt(rng, 40), 2))
        drive.step()
        assert prompt_tokens(drive) == [(0, first)]
        drive.drain()
