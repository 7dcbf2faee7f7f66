"""The bound on prompt tokens of steps that have decode rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_workloads import limits, prompt, random_limits, random_requests, request

from headstock.conformance.scheduler.toy_schedule import Drive, alone
from headstock.scheduler import Paced, RowCounter


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
@settings(max_examples=8)
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
        assert is_prompt.all() or not is_exact or counts[is_prompt].sum() <= bound
    assert drive.outputs == {one.id: alone(one) for one in requests}
