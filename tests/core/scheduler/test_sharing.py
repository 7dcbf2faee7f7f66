"""Who may share which pages."""

from __future__ import annotations

import numpy as np
import pytest
from toy_workloads import limits, prompt, request

from headstock.scheduler import Arrived, Failed, initial_state, step
from headstock_conformance.scheduler.toy_device import alone
from headstock_conformance.scheduler.toy_schedule import Drive, run

SEED = 7
RNG = np.random.default_rng(SEED)


@pytest.mark.feature("T12", "T15")
def test_equal_prompts_compute_the_tail_only_and_share_pages() -> None:
    tokens = prompt(RNG, 21)
    drive = Drive(limits())
    drive.submit(request("a", tokens, 40))
    drive.step()
    drive.step()
    drive.submit(request("b", tokens, 40))
    plan = drive.step()

    assert (plan.starts[-1], plan.stops[-1]) == (20, 21)
    a, b = (drive.state.pages[0][row][:5] for row in (0, 1))
    assert (a == b).all() and (drive.state.refs[0][a] == 2).all()
    drive.drain()
    assert drive.outputs["a"] == drive.outputs["b"] == alone(request("x", tokens, 40))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("length", [1, 2, 6])
def test_the_pages_of_the_last_step_are_found_again(length: int, overlap: bool) -> None:
    tokens = prompt(RNG, 21)
    drive = run(Drive(limits(overlap=overlap)), request("a", tokens, length))
    again = np.concatenate([tokens, drive.outputs["a"], [3]]).astype(np.int32)
    drive.submit(request("b", again, 3))
    plan = drive.step()
    # The last token of "a" was sampled and not computed.
    assert plan.starts.tolist() == [(21 + length - 1) // 4 * 4]
    drive.drain()
    assert drive.outputs["b"] == alone(request("b", again, 3))


def test_pages_of_a_row_that_failed_are_not_found_again() -> None:
    tokens, bounds = prompt(RNG, 21), limits()
    state = initial_state(bounds)
    plan = step(state, (Arrived(request("a", tokens, 1)),))
    step(state, (Failed(plan.rows, plan.admission_ids),))
    plan = step(state, (Arrived(request("b", tokens, 1)),))
    assert plan.starts.tolist() == [0]


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    tokens = prompt(RNG, 20)
    drive = run(Drive(limits()), request("a", tokens, 3))
    drive.submit(request("b", tokens, 3))
    plan = drive.step()

    planned = (plan.starts.tolist(), plan.stops.tolist(), plan.num_logits.tolist())
    assert planned == ([16], [20], [1]), "the last token is not computed"


def test_two_equal_prompts_at_once_end_up_on_one_set_of_pages() -> None:
    tokens = prompt(RNG, 33)
    drive = Drive(limits(max_batch_tokens=100))
    for name in "ab":
        # so that neither may wait for the other
        drive.submit(request(name, tokens, 20, prompt_logprobs=True))
    drive.step()
    assert not set(drive.state.pages[0][0].tolist()) & set(drive.state.pages[0][1].tolist())
    drive.step()

    assert (drive.state.pages[0][0][:8] == drive.state.pages[0][1][:8]).all()
    drive.drain()
    assert drive.outputs["a"] == drive.outputs["b"] == alone(request("x", tokens, 20))


def test_a_partial_page_is_never_shared() -> None:
    head = prompt(RNG, 18)
    one, other = (np.concatenate([head, tail]) for tail in (prompt(RNG, 9), prompt(RNG, 9)))
    drive = run(Drive(limits()), request("a", one, 5))
    drive.submit(request("b", other, 5))

    assert drive.step().starts.tolist() == [16], "part of a page is shared"
    drive.drain()
    assert drive.outputs["b"] == alone(request("b", other, 5))


def test_namespaces_share_nothing() -> None:
    tokens = prompt(RNG, 20)
    drive = run(Drive(limits()), request("a", tokens, 2, namespace="one"))
    drive.submit(request("b", tokens, 2, namespace="two"))

    assert drive.step().starts.tolist() == [0], "it found what another tenant computed"
