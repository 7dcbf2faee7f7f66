"""What clearing the prefix index frees, and what it leaves alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from often import count_examples
from toy_workloads import limits, prompt, random_limits, random_requests, request

from headstock.scheduler import Cleared, initial_state, step
from headstock.scheduler.invariants import check_state
from headstock_conformance.scheduler.toy_device import alone
from headstock_conformance.scheduler.toy_schedule import Drive


def test_an_idle_engine_has_every_page_free_afterwards() -> None:
    bounds = limits()
    drive = Drive(bounds)
    rng = np.random.default_rng(1)
    for number in range(5):
        drive.submit(request(str(number), prompt(rng, 30)))
    drive.drain()
    (cached,) = bounds.policy.stats(drive.state.index).pages
    assert cached > 0 and drive.state.num_free[0] == 100 - cached

    drive.events.append(Cleared())
    drive.step()
    check_state(drive.state, bounds)
    assert drive.state.num_free[0] == 100 and bounds.policy.stats(drive.state.index).pages == (0,)


def test_a_request_that_arrives_with_it_finds_no_prefix() -> None:
    tokens = prompt(np.random.default_rng(2), 30)
    cached = []
    for clear in (False, True):
        drive = Drive(limits())
        drive.submit(request("first", tokens))
        drive.drain()
        drive.events += [Cleared()] * clear
        drive.submit(request("second", tokens))
        drive.step()
        cached.append(30 - int((drive.plans[-1].stops - drive.plans[-1].starts).sum()))
    assert cached == [28, 0]


def test_it_does_nothing_without_an_index() -> None:
    bounds = limits(policy=None)
    state = initial_state(bounds)
    plan = step(state, (Cleared(),))
    check_state(state, bounds)
    assert state.num_free[0] == 100 and not len(plan.rows)


@settings(max_examples=count_examples(24))
@given(seed=st.integers(0, 2**32 - 1))
def test_running_requests_keep_their_pages_and_their_tokens(seed: int) -> None:
    rng = np.random.default_rng(seed)
    drive = Drive(random_limits(rng, "mixed"))
    requests = random_requests(rng)
    for one in requests:
        drive.submit(one)
    while drive.busy:
        if rng.random() < 0.3:
            drive.events.append(Cleared())
        drive.step()
        check_state(drive.state, drive.limits)
    assert drive.outputs == {one.id: alone(one) for one in requests}
