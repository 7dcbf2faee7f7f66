"""Requests that begin alike and come together: the beginning is computed once."""

from __future__ import annotations

import numpy as np
import pytest
from toy_workloads import SCHEDULERS, limits, prompt, request

from headstock.scheduler import Aborted, Failed
from headstock_conformance.scheduler.toy_device import alone
from headstock_conformance.scheduler.toy_schedule import Drive

RNG = np.random.default_rng(21)


def computed(drive: Drive) -> int:
    """Tokens that all plans computed together."""
    return sum(plan.num_tokens for plan in drive.plans)


@pytest.mark.feature("T12", "T15")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_siblings_compute_their_prompt_once(scheduler: str, overlap: bool) -> None:
    tokens, n = prompt(RNG, 90), 4
    drive = Drive(limits(scheduler=scheduler, overlap=overlap, max_batch_tokens=200))
    for number in range(n):
        drive.submit(request(str(number), tokens, 10))
    drive.drain()

    # The whole prompt, the part of a page after it (90 = 22 * 4 + 2) for each of the others, and 9
    # tokens each.
    wasted = n if overlap else 0
    assert computed(drive) - 90 - (n - 1) * 2 - n * 9 <= wasted
    assert set(map(tuple, drive.outputs.values())) == {tuple(alone(request("x", tokens, 10)))}


@pytest.mark.feature("T12")
def test_siblings_of_a_chunked_prompt_wait_for_its_chunks() -> None:
    tokens = prompt(RNG, 150)
    drive = Drive(limits(max_batch_tokens=16))
    for name in "abc":
        drive.submit(request(name, tokens, 5))
    drive.drain()

    assert computed(drive) <= 150 + 2 * 2 + 3 * 4
    assert set(drive.reasons.values()) == {"length"}


def test_a_request_that_shares_only_the_beginning_waits_for_no_more_than_that() -> None:
    head = prompt(RNG, 8)
    one, other = (np.concatenate([head, prompt(RNG, 100)]) for _ in range(2))
    drive = Drive(limits(max_batch_tokens=20))
    drive.submit(request("a", one, 5))
    drive.submit(request("b", other, 5))
    drive.submit(request("c", prompt(RNG, 4), 5))
    first, second = drive.step(), drive.step()

    assert first.starts.tolist() == [0] and (
        second.starts.tolist(),
        second.new_row_ids.tolist(),
    ) == (
        [20],
        [],
    )
    while "b" not in drive.reasons:
        drive.step()
    assert computed(drive) <= 108 + 100 + 4 + 3 * 4 and drive.outputs["b"] == alone(
        request("x", other, 5)
    )


def test_others_go_ahead_of_those_that_wait_for_a_sibling() -> None:
    tokens = prompt(RNG, 30)
    drive = Drive(limits())
    for name in "ab":
        drive.submit(request(name, tokens, 5))
    drive.submit(request("c", prompt(RNG, 9), 5))
    plan = drive.step()
    admitted = [drive.state.requests_by_row[row].request.id for row in plan.new_row_ids.tolist()]

    assert admitted == ["a", "c"] and [entry.request.id for entry in drive.state.waiting] == ["b"]


@pytest.mark.parametrize("end", ["abort", "fail"])
def test_a_sibling_whose_first_is_gone_computes_for_itself(end: str) -> None:
    tokens = prompt(RNG, 60)
    drive = Drive(limits(max_batch_tokens=10))
    for name in "ab":
        drive.submit(request(name, tokens, 5))
    plan = drive.step()
    drive.events.append(Aborted("a") if end == "abort" else Failed(plan.rows, plan.admission_ids))
    drive.drain()

    assert drive.outputs["b"] == alone(request("x", tokens, 5)) and drive.reasons["b"] == "length"


def test_tenants_and_higher_priorities_do_not_wait_for_others() -> None:
    tokens = prompt(RNG, 40)
    drive = Drive(limits(max_batch_tokens=100))
    drive.submit(request("low", tokens, 5))
    drive.submit(request("tenant", tokens, 5, namespace="other"))
    drive.step()
    drive.submit(request("high", tokens, 5, priority=1))

    assert drive.state.num_running == 2
    drive = Drive(limits(max_batch_tokens=30))
    drive.submit(request("low", tokens, 5))
    drive.step()
    drive.submit(request("high", tokens, 5, priority=1))
    drive.step()
    assert drive.state.num_running == 2
