"""Contiguous mode: a request that goes on where one ended takes its region over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_workloads import FULL, limits, prompt, request, window

from headstock.scheduler import Aborted, Cleared, Failed, Limits
from headstock.scheduler.invariants import check_idle, check_state
from headstock_conformance.scheduler.toy_device import VOCAB, alone
from headstock_conformance.scheduler.toy_schedule import Drive

RNG = np.random.default_rng(41)


def regions(**changes: Any) -> Limits:
    """One region of 160 tokens a row."""
    rows = changes.setdefault("max_rows", 4)
    sizes = {"page_size": 160, "num_pages": rows, "max_regions": rows, "policy": None}
    return limits(**(sizes | changes))


def ended(drive: Drive, name: str, tokens: np.ndarray, most: int = 6, **changes: Any) -> np.ndarray:
    """Run a request to its end; prompt and output."""
    drive.submit(request(name, tokens, most, **changes))
    drive.drain()
    return np.concatenate([tokens, drive.outputs[name]]).astype(np.int32)


@pytest.mark.feature("T16")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, window(20))])
def test_a_request_that_extends_an_ended_one_takes_its_region_over(
    groups: Any, overlap: bool
) -> None:
    drive = Drive(regions(groups=groups, overlap=overlap))
    whole = ended(drive, "a", prompt(RNG, 30))
    (kept,) = drive.state.regions
    tokens = np.concatenate([whole, prompt(RNG, 10)])
    drive.submit(request("b", tokens, 6))
    plan = drive.step()

    # the last token of "a" was never computed
    assert plan.starts.tolist() == [35] and drive.state.regions == ()
    assert [rows[0].tolist() for rows in drive.state.pages] == [[page] for page in kept.pages]
    drive.drain()
    assert drive.outputs["b"] == alone(request("x", tokens, 6))


@pytest.mark.feature("T16")
def test_a_mere_common_prefix_is_computed_again() -> None:
    drive = Drive(regions())
    whole = ended(drive, "a", prompt(RNG, 30))
    for name, tokens in (
        ("b", whole[:20]),
        ("c", np.concatenate([whole[:34], [(whole[34] + 1) % VOCAB, 1, 2]])),
    ):
        drive.submit(request(name, tokens.astype(np.int32), 3))
        assert drive.step().starts.tolist() == [0]
        drive.drain()


@pytest.mark.feature("T16")
def test_a_region_is_moved_and_never_shared() -> None:
    drive = Drive(regions())
    whole = ended(drive, "a", prompt(RNG, 30))
    tokens = np.concatenate([whole, prompt(RNG, 4)])
    for name in "bc":
        drive.submit(request(name, tokens, 6))
    plan = drive.step()

    assert sorted(plan.starts.tolist()) == [0, 35]
    drive.drain()
    assert drive.outputs["b"] == drive.outputs["c"] == alone(request("x", tokens, 6))


@pytest.mark.feature("T16")
def test_the_longest_region_is_taken_and_tenants_keep_apart() -> None:
    drive = Drive(regions())
    whole = ended(drive, "a", prompt(RNG, 10))
    longer = np.concatenate([whole, prompt(RNG, 10)])
    drive.submit(request("b", longer, 6, namespace="other"))
    assert drive.step().starts.tolist() == [0]
    drive.drain()
    whole = ended(drive, "c", longer)
    ended(drive, "d", longer[:10])
    drive.submit(request("e", np.concatenate([whole, [3, 4]]).astype(np.int32), 6))

    assert drive.step().starts.tolist() == [31]


def test_regions_are_dropped_oldest_first_when_rows_need_them_or_too_many_are_kept() -> None:
    drive = Drive(regions(max_rows=2))
    wholes = [ended(drive, str(i), prompt(RNG, 20)) for i in range(3)]
    assert [region.tokens.tolist() for region in drive.state.regions] == [
        whole[:-1].tolist() for whole in wholes[1:]
    ]
    few = Drive(regions(max_rows=4, max_regions=1))
    for number in range(3):
        ended(few, str(number), prompt(RNG, 20))

    assert len(few.state.regions) == 1 and few.state.num_free == [3]


def test_every_row_can_be_seated_at_once() -> None:
    drive = Drive(regions(max_rows=4))
    for number in range(9):
        drive.submit(request(str(number), prompt(RNG, 9), 5))
    drive.step()

    assert drive.state.num_running == 4


def test_a_failed_row_leaves_no_region_and_an_aborted_one_what_was_computed() -> None:
    drive = Drive(regions(max_batch_tokens=16))
    tokens = prompt(RNG, 40)
    drive.submit(request("a", tokens, 5))
    plan = drive.step()
    drive.events.append(Failed(plan.rows, plan.admission_ids))
    drive.drain()
    assert drive.state.regions == ()
    drive.submit(request("b", tokens, 5))
    drive.step()
    drive.step()
    drive.events.append(Aborted("b"))
    drive.drain()
    assert [region.tokens.tolist() for region in drive.state.regions] == [tokens[:32].tolist()]
    drive.submit(request("c", tokens, 5))

    assert drive.step().starts.tolist() == [32]
    drive.drain()
    assert drive.outputs["c"] == alone(request("x", tokens, 5))


def test_clearing_frees_the_regions_and_scored_prompts_take_none() -> None:
    drive = Drive(regions())
    whole = ended(drive, "a", prompt(RNG, 12))
    drive.submit(request("b", np.concatenate([whole, whole]), 3, prompt_logprobs=True))
    assert drive.step().starts.tolist() == [0]
    drive.drain()
    drive.events.append(Cleared())
    drive.step()

    assert drive.state.regions == () and drive.state.num_free == [4]
    check_idle(drive.state, drive.limits)


@pytest.mark.full
@pytest.mark.feature("T16")
@given(st.integers(0, 2**32 - 1), st.booleans(), st.booleans())
@settings(max_examples=100)
def test_conversations_of_many_turns_say_what_each_turn_says_alone(
    seed: int, overlap: bool, two: bool
) -> None:
    rng = np.random.default_rng(seed)
    groups = (FULL, window(int(rng.integers(1, 40)))) if two else (FULL,)
    rows = int(rng.integers(1, 4))
    drive = Drive(
        regions(
            max_rows=rows, max_regions=rows, max_batch_tokens=16, groups=groups, overlap=overlap
        )
    )
    asked = {}
    talks = [prompt(rng, int(rng.integers(1, 20))) for _ in range(3)]
    for turn in range(4):
        for number in range(3):
            one = request(f"{turn}.{number}", talks[number], 5, priority=int(rng.integers(0, 2)))
            asked[one.id] = one
            drive.submit(one)
            if rng.random() < 0.5:
                drive.step()
            if rng.random() < 0.1:
                drive.events.append(Aborted(one.id))
        drive.drain()
        check_state(drive.state, drive.limits)
        check_idle(drive.state, drive.limits)
        for number in range(3):
            said = drive.outputs[f"{turn}.{number}"]
            talks[number] = np.concatenate([talks[number], said, prompt(rng, 3)]).astype(np.int32)
    for name, one in asked.items():
        said = drive.outputs[name]
        assert said == alone(one)[: len(said)] and (
            drive.reasons[name] == "abort" or len(said) == 5
        )
