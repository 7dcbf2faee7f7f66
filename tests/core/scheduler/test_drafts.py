"""Drafts: which rows may have them, what a plan says of them, and what becomes of rejected ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from often import count_examples
from toy_workloads import FULL, limits, prompt, request

from headstock.scheduler import Plan, RowCounter, Sampled
from headstock.scheduler.page_pool import count_held_pages
from headstock.spi import Budget, ScheduleDecision, View
from headstock_conformance.scheduler.toy_device import alone, next_token
from headstock_conformance.scheduler.toy_schedule import Drive, run

RNG = np.random.default_rng(5)


class Scripted(Drive):
    """A drive whose rows get the drafts that `guess` makes of their tokens, or are held back."""

    def propose(self, arrived: Sampled, rng: np.random.Generator) -> Sampled:
        """The samples with drafts for rows without a token in flight; the others are held."""
        ids = [] if self.in_flight is None else self.in_flight.admission_ids.tolist()
        busy = np.isin(arrived.admission_ids, ids)
        drafts: list[list[int]] = []
        stop = 0
        for i, (row, count) in enumerate(zip(arrived.rows, arrived.counts, strict=True)):
            start, stop = stop, stop + count
            known = self.state.tokens[row, : self.state.row_counters[RowCounter.NUM_KNOWN, row]]
            history = [*known.tolist(), *arrived.tokens[start:stop].tolist()]
            drafts.append([] if busy[i] else self.guess(int(row), history))
        return Sampled(
            arrived.rows,
            arrived.admission_ids,
            arrived.counts,
            arrived.tokens,
            np.array([len(each) for each in drafts], np.int32),
            np.array([token for each in drafts for token in each], np.int32),
            (busy & np.isin(arrived.rows, self.held_rows)).astype(np.int32),
        )

    held_rows: tuple[int, ...] = (0, 1, 2)

    def guess(self, row: int, history: list[int]) -> list[int]:
        """Three tokens, of which the first two are right."""
        right = [next_token(history)]
        right.append(next_token(history + right))
        wrong = (next_token(history + right) + 1) % 50
        return [*right, wrong]


def drafting(**changes: object) -> Scripted:
    """A drive with drafts."""
    return Scripted(limits(max_drafts=3, **changes), RNG)


@pytest.mark.feature("T6")
def test_a_plan_says_exactly_what_is_verified_and_the_row_goes_back_to_what_was_accepted() -> None:
    drive = drafting()
    drive.submit(request("a", prompt(RNG, 6), 12))
    first = drive.step()
    plan = drive.step()
    sampled = alone(request("x", drive.device.requests[0].prompt, 12))

    assert (first.num_drafts.tolist(), first.drafts.tolist()) == ([], [])
    assert (plan.starts.tolist(), plan.stops.tolist()) == ([6], [10])
    assert (plan.num_logits.tolist(), plan.num_drafts.tolist()) == ([4], [3])
    assert plan.drafts.tolist()[:2] == sampled[1:3] and plan.drafts[2] != sampled[3]
    assert Plan.decode(plan.encode()).drafts.tolist() == plan.drafts.tolist()
    following = drive.step()  # two drafts and the token after them were accepted
    assert (following.starts.tolist(), following.stops.tolist()) == ([9], [13])
    drive.drain()
    assert drive.outputs["a"] == sampled


@pytest.mark.feature("S18")
def test_under_overlap_a_row_that_is_held_sits_out_alone_and_a_row_that_verifies_too() -> None:
    drive = drafting(overlap=True)
    drive.submit(request("drafted", prompt(RNG, 6), 20))
    for _ in range(2):
        drive.step()
    sizes = [drive.step().num_tokens for _ in range(6)]
    # held, verifies four positions, and is not planned on before that has landed
    assert sizes == [0, 4, 0, 4, 0, 4]
    drive = drafting(overlap=True)
    drive.guess = lambda row, history: Scripted.guess(drive, row, history) if row else []  # type: ignore[method-assign]
    drive.held_rows = (1,)
    for name in ("plain", "drafted"):
        drive.submit(request(name, prompt(RNG, 6), 20))
    plans = [drive.step() for _ in range(8)]
    assert all(0 in plan.rows for plan in plans), "a row without drafts lost its overlap"
    assert [1 in plan.rows for plan in plans[2:]] == [False, True] * 3
    drive.drain()
    for name, one in zip(("plain", "drafted"), (0, 1), strict=True):
        assert drive.outputs[name] == alone(request("x", drive.device.requests[one].prompt, 20))


@given(seed=st.integers(0, 2**32 - 1), overlap=st.booleans())
@settings(max_examples=count_examples(75))
def test_a_stop_id_among_accepted_drafts_counts_as_it_does_without_drafts(
    seed: int, overlap: bool
) -> None:
    rng = np.random.default_rng(seed)
    requests = []
    for number in range(4):
        tokens, at = prompt(rng, int(rng.integers(1, 30))), int(rng.integers(0, 20))
        stop = alone(request("x", tokens, 20))[at]
        # The stop id comes right before, at or behind the end of min_tokens.
        least = max(at + int(rng.integers(-2, 4)), 0)
        requests.append(
            request(
                str(number),
                tokens,
                int(rng.integers(max(least, 1), 24)),
                stop_ids=(stop,),
                min_tokens=least,
            )
        )
    drive = run(Drive(limits(overlap=overlap), rng), *requests)

    assert drive.outputs == {one.id: alone(one) for one in requests}
    stopped = {
        one.id
        for one in requests
        if len(alone(one)) >= one.min_tokens and alone(one)[-1] in one.stop_ids
    }
    assert {name for name, reason in drive.reasons.items() if reason == "stop"} == stopped


def test_drafts_preempt_no_row() -> None:
    # Two rows that end with 18 computed tokens need 5 pages of 4 each, and there are 6. So one is
    # preempted, though not before the tokens that are known lack a page.
    drive = drafting(num_pages=6, max_rows=2, policy=None)
    for name in ("a", "b"):
        drive.submit(request(name, prompt(RNG, 7), 12))
    verified = 0
    while not drive.state.num_preempted:
        verified += int(drive.step().num_drafts.sum())
        held = count_held_pages(drive.state, drive.limits)
        assert held <= 6
    needed = sum(-(-(7 + len(drive.outputs[name])) // 4) for name in ("a", "b"))
    assert verified and needed > 6, f"{needed} pages were enough"
    drive.drain()


def test_a_row_that_verifies_does_not_wait_behind_a_long_prompt() -> None:
    drive = drafting(max_batch_tokens=16)
    drive.submit(request("decodes", prompt(RNG, 6), 20))
    drive.step()
    drive.submit(request("long", prompt(RNG, 100), 4, priority=1))
    plans = [drive.step() for _ in range(4)]

    # A plan without drafts has no counts of them.
    assert [plan.num_drafts.tolist()[:1] for plan in plans] == [[3]] * 4
    assert all(plan.rows[0] == 0 for plan in plans)
    assert all(plan.num_tokens == 16 for plan in plans)


@given(budget=st.integers(1, 6), rows=st.integers(1, 3))
@settings(max_examples=count_examples(50))
def test_drafts_that_do_not_fit_into_the_step_are_dropped(budget: int, rows: int) -> None:
    drive = drafting(max_batch_tokens=budget, max_rows=rows)
    for number in range(rows):
        drive.submit(request(str(number), prompt(np.random.default_rng(number), 5), 9))
    drive.drain()

    assert max(plan.num_tokens for plan in drive.plans) <= budget
    verified = [int(plan.num_drafts.max(initial=0)) for plan in drive.plans]
    assert max(verified) <= min(budget - 1, 3) and (budget == 1 or max(verified) > 0)
    for number in range(rows):
        one = request("x", prompt(np.random.default_rng(number), 5), 9)
        assert drive.outputs[str(number)] == alone(one)


def test_a_scheduler_sees_how_many_of_the_new_tokens_are_drafts() -> None:
    seen: list[tuple[list[int], list[int]]] = []

    def schedule(view: View, budget: Budget) -> ScheduleDecision:
        seen.append((view.num_new_tokens.tolist(), view.num_drafts.tolist()))
        rows = view.num_new_tokens.nonzero()[0]
        return ScheduleDecision(
            rows=rows,
            counts=view.num_new_tokens[rows],
            admit=np.arange(len(view.waiting_lengths), dtype=np.int32),
        )

    drive = drafting(schedule=schedule, max_rows=1, groups=(FULL,))
    drive.submit(request("a", prompt(RNG, 6), 9))
    for _ in range(2):
        drive.step()
    assert seen == [([0], [0]), ([4], [3])]
