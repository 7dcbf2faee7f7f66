"""Lanes and figures of runs that were worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from itertools import pairwise

import numpy as np
import pytest
from attrs import evolve
from core.record.runs import make_requests, make_run_limits, run_steps
from often import often
from plugins.replay_view.scripted_runs import MS, ONE_ROW, run_script, show_step
from toy_workloads import limits, request

from headstock.builtin import mixed
from headstock.record.recorded_step import RecordedStep
from headstock.record.replay import Divergence, ReplayedStep
from headstock.scheduler import Aborted, Arrived, Event, Plan, State, initial_state, step
from headstock.spi import Budget, ScheduleDecision, View
from headstock_replay_view.headline import Headline, find_axis_end, make_headline, percentile
from headstock_replay_view.history import SERIES, History
from headstock_replay_view.lanes import (
    DECODE,
    FIELDS,
    GONE,
    PREEMPTED,
    PREFILL,
    QUEUED,
    STALLED,
    Lanes,
)
from headstock_replay_view.page import render_html
from headstock_replay_view.page_data import collect_page_data


def list_numbers(lanes: Lanes, *names: str) -> list[tuple[int, ...]]:
    """Some numbers of each lane."""
    table = lanes.list_numbers()
    return list(zip(*(table[name] for name in names), strict=True))


def measure(history: History) -> Headline:
    """The figures of what was watched."""
    return make_headline(history.make_series(), history.lanes, history.limits.num_pages[0])


def one_after_the_other() -> History:
    """`a` (6 prompt tokens, 3 to generate) takes two steps for its prompt, and `b` (2 and 1) waits
    for its row.
    """
    a, b = request("a", [1] * 6, 3), request("b", [2] * 2, 1)
    return run_script(
        ONE_ROW,
        [(0, [Arrived(a), Arrived(b)]), (10, []), (30, []), (60, []), (100, []), (150, [])],
    )


def test_a_lane_is_queued_until_it_is_admitted_then_in_prefill_then_decodes() -> None:
    lanes = one_after_the_other().lanes
    assert lanes.segments == [
        [(0, PREFILL), (2, DECODE), (4, GONE)],
        [(0, QUEUED), (4, PREFILL), (5, GONE)],
    ]
    assert list_numbers(lanes, "arrived", "admitted", "first", "ended", "prompt", "output") == [
        (0, 0, 2, 4, 6, 3),
        (0, 4, 5, 5, 2, 1),
    ]
    assert lanes.reasons == ["length", "length"]


def test_the_headline_of_a_run_worked_out_by_hand() -> None:
    figures = measure(one_after_the_other())
    assert (figures.steps, figures.requests, figures.finished, figures.unfinished) == (6, 2, 2, 0)
    assert (figures.span, figures.busy) == (0.15, 0.15)
    assert (figures.output_tokens, figures.prompt_tokens) == (4, 8)
    assert figures.output_rate == pytest.approx(4 / 0.15) and figures.input_rate == pytest.approx(
        8 / 0.15
    )
    assert figures.ttft == (0.03, 0.15)
    assert figures.gap == (0.03, 0.04)
    assert figures.step_ms == (30, 50)
    assert (figures.slow_from, figures.slow, figures.slowest) == (40, (4,), 4)
    assert figures.busiest == 0
    assert (figures.running, figures.waiting, figures.pages, figures.all_pages) == (1, 1, 2, 100)
    assert (figures.hit_rate, figures.preemptions, figures.stalled) == (0, 0, 0)


def test_requests_are_counted_by_what_they_do_in_each_step() -> None:
    history = one_after_the_other()
    names = ("queued", "prefilling", "decoding", "stalled", "away", "sampled")
    assert [tuple(int(history.make_series()[name][at]) for name in names) for at in range(6)] == [
        (1, 1, 0, 0, 0, 0),
        (1, 1, 0, 0, 0, 0),
        (1, 0, 1, 0, 0, 1),
        (1, 0, 1, 0, 0, 1),
        (0, 1, 0, 0, 0, 1),
        (0, 0, 0, 0, 0, 1),
    ]


def run_preemption(*more: tuple[int, list[Event]]) -> History:
    """`low` (4 and 4) computes 5 tokens, has two, and loses the only row to `high` (2 and 1)."""
    low, high = request("low", [1] * 4, 4), request("high", [2] * 2, 1, priority=1)
    engine = evolve(ONE_ROW, max_batch_tokens=8)
    return run_script(engine, [(0, [Arrived(low)]), (10, []), (20, [Arrived(high)]), *more])


def test_a_preempted_lane_shows_its_way_back_and_what_was_computed_again() -> None:
    lanes = run_preemption((30, []), (40, []), (50, [])).lanes
    assert lanes.segments == [
        [(0, PREFILL), (1, DECODE), (2, PREEMPTED), (3, PREFILL), (4, DECODE), (5, GONE)],
        [(2, PREFILL), (3, GONE)],
    ]
    assert list_numbers(lanes, "preemptions", "recomputed", "output", "first") == [
        (1, 5, 4, 1),
        (0, 0, 1, 3),
    ]
    assert lanes.priorities == [0, 1]
    assert lanes.num_preempted == 0


def test_a_preempted_request_that_never_comes_back_is_known_from_the_replayed_state() -> None:
    history = run_preemption()
    assert history.lanes.segments[0] == [(0, PREFILL), (1, DECODE), (2, PREEMPTED)]
    figures = measure(history)
    assert (figures.never_back, figures.preemptions, figures.preempted, figures.unfinished) == (
        1,
        1,
        1,
        2,
    )
    assert [int(count) for count in history.make_series()["away"]] == [0, 0, 1]


def test_a_preempted_request_that_is_aborted_ends_there() -> None:
    history = run_preemption((30, [Aborted("low")]))
    assert history.lanes.segments[0][-2:] == [(2, PREEMPTED), (3, GONE)]
    assert history.lanes.reasons == ["abort", "length"] and history.lanes.num_preempted == 0
    figures = measure(history)
    assert (figures.never_back, figures.aborted, figures.finished) == (1, 1, 1)


def leaving_out(number: int) -> Callable[[View, Budget], ScheduleDecision]:
    """A scheduler that runs nothing in one step."""

    def schedule(view: View, budget: Budget) -> ScheduleDecision:
        return (
            ScheduleDecision(rows=np.empty(0, np.int32), counts=np.empty(0, np.int32))
            if view.step == number
            else mixed.schedule(view, budget)
        )

    return schedule


def test_a_row_that_a_step_leaves_out_stalls() -> None:
    engine = evolve(ONE_ROW, schedule=leaving_out(2))
    history = run_script(
        engine, [(0, [Arrived(request("a", [1] * 2, 3))]), *((10 * at, []) for at in range(1, 6))]
    )
    assert history.lanes.segments == [
        [(0, PREFILL), (1, DECODE), (2, STALLED), (3, DECODE), (4, GONE)]
    ]
    assert measure(history).stalled == 1


def test_an_id_may_come_again_and_what_can_never_fit_ends_at_once() -> None:
    same, other, huge = (
        request("same", [1], 1),
        request("same", [2], 1),
        request("huge", [1] * 170, 1),
    )
    script: list[tuple[int, list[Event]]] = [
        (0, [Arrived(same), Arrived(huge), Arrived(other)]),
        (10, [Aborted("same")]),
        (20, []),
    ]
    lanes = run_script(ONE_ROW, script).lanes
    assert lanes.segments == [
        [(0, PREFILL), (1, GONE)],
        [(0, QUEUED), (0, GONE)],
        [(0, QUEUED), (1, GONE)],
    ]
    assert lanes.reasons == ["length", "error", "abort"]


def test_the_hit_rate_is_of_prompts_when_they_are_first_admitted() -> None:
    engine = limits(max_rows=1)
    a, b = request("a", [*range(9)], 2), request("b", [*range(9)], 1)
    history = run_script(engine, [(0, [Arrived(a)]), (10, [Arrived(b)]), (20, []), (30, [])])
    assert list_numbers(history.lanes, "prompt", "cached") == [(9, 0), (9, 8)]
    assert measure(history).hit_rate == 8 / 18


def test_the_busiest_step_is_the_first_of_most_tokens_then_of_most_requests() -> None:
    lanes = Lanes(ONE_ROW)
    series = {name: np.zeros(5, np.int64) for name in SERIES}
    series["prefill"] += [1, 4, 2, 4, 4]
    series["decode"] += [5, 3, 4, 3, 3]
    series["running"] += [9, 3, 9, 4, 4]
    assert make_headline(series, lanes, 10).busiest == 3


def test_steps_above_p99_are_listed_and_do_not_move_the_axis() -> None:
    count = 201
    series = {name: np.zeros(count, np.int64) for name in SERIES}
    lengths = np.full(count - 1, 5 * MS)
    lengths[[40, 150]] = 700 * MS, 900 * MS
    series["at"][1:] = np.cumsum(lengths)
    series["decode"] += 1
    figures = make_headline(series, Lanes(ONE_ROW), 10)
    assert (figures.slow_from, figures.slow, figures.slowest) == (5, (40, 150), 150)


def test_one_outlier_among_few_steps_does_not_move_the_axis() -> None:
    assert find_axis_end(np.array([5, 9, 5, 400, 6])) == 9
    assert find_axis_end(np.array([5] * 98 + [400])) == 5
    assert find_axis_end(np.array([5] * 99 + [400])) == 5
    assert find_axis_end(np.array([5] * 98 + [300, 400])) == 300
    assert find_axis_end(np.array([7])) == 7 and find_axis_end(np.zeros(0, np.int64)) is None


def test_time_in_which_nothing_was_computed_is_not_busy() -> None:
    a, b = request("a", [1] * 2, 1), request("b", [2] * 2, 1)
    history = run_script(ONE_ROW, [(0, [Arrived(a)]), (10, []), (5010, [Arrived(b)]), (5030, [])])
    figures = measure(history)
    assert (figures.span, figures.busy) == (5.03, 0.03)
    assert figures.output_rate == pytest.approx(2 / 0.03)
    assert figures.step_ms == (10, 20)


@pytest.mark.parametrize("share", [1, 50, 99, 100])
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(share: int) -> None:
    rng = np.random.default_rng(share)
    for size in (1, 2, 3, 99, 100, 101, 1000):
        values = rng.integers(0, 50, size)
        right = min(
            value for value in values.tolist() if 100 * int((values <= value).sum()) >= share * size
        )
        assert percentile(values, share) == right
    assert percentile(np.zeros(0, np.int64), share) is None


@pytest.mark.parametrize(
    ("overlap", "reuse"), often(1, [(True, True), (False, False), (True, False), (False, True)])
)
def test_lanes_agree_with_plans_and_queues_in_every_step(overlap: bool, reuse: bool) -> None:
    engine = (
        make_run_limits(num_pages=80, overlap=overlap)
        if reuse
        else make_run_limits(num_pages=80, overlap=overlap, policy=None)
    )
    history, states, plans = History(engine), list[State](), list[Plan]()
    for number, (events, state, plan) in enumerate(run_steps(engine, make_requests(120), 700)):
        show_step(history, number, number * MS, list(events), state, plan)
        states.append(copy(state))  # the next step writes it
        plans.append(plan)
    lanes, count = history.lanes, len(states)
    done = np.full((len(lanes.ids), count), GONE)
    for lane, segments in enumerate(lanes.segments):
        for (start, phase), (stop, _) in pairwise([*segments, (count, GONE)]):
            done[lane, start:stop] = phase
    for number, (state, plan) in enumerate(zip(states, plans, strict=True)):
        at = done[:, number]
        assert np.isin(at, (PREFILL, DECODE)).sum() >= len(plan.rows)
        assert (at == DECODE).sum() <= state.num_running
        assert np.isin(at, (PREFILL, DECODE, STALLED)).sum() == state.num_running
        assert np.isin(at, (QUEUED, PREEMPTED)).sum() == len(state.waiting)
        assert (at == PREEMPTED).sum() == sum(entry.preemptions > 0 for entry in state.waiting)
        assert {lanes.ids[lane] for lane in np.flatnonzero(at == QUEUED)} == {
            entry.request.id for entry in state.waiting if not entry.preemptions
        }
    table = lanes.list_numbers()
    assert sum(table["preemptions"]) == states[-1].num_preempted > 0
    assert sum(table["output"]) == sum(int(state.outcome.accepted_counts.sum()) for state in states)
    ended = {ended.id: (ended.reason, ended.cached) for state in states for ended in state.ended}
    assert {
        lanes.ids[lane]: lanes.reasons[lane]
        for lane in np.flatnonzero(np.array(table["ended"]) >= 0)
    } == {id: reason for id, (reason, _) in ended.items()}
    assert set(table) == set(FIELDS)


def test_a_step_that_differs_is_not_drawn() -> None:
    history = one_after_the_other()
    state = initial_state(ONE_ROW)
    plan = step(state, [Arrived(request("c", [1], 1))])
    wrong = Divergence(step=6, field="rows", recorded="[1]", replayed="[0]")
    recorded = RecordedStep(number=6, at=0, events=(), plan=plan, admissions=(), error="")
    history.add_step(ReplayedStep(recorded=recorded, after=state, divergence=wrong))
    assert len(history.series) == 6 and history.differing_step == 6 and len(history.lanes.ids) == 2


def test_a_clock_that_goes_back_stands_still() -> None:
    history = run_script(ONE_ROW, [(10, [Arrived(request("a", [1], 1))]), (3, []), (12, [])])
    assert history.make_series()["at"].tolist() == [10 * MS, 10 * MS, 12 * MS]


def test_numbers_of_any_size_are_drawn() -> None:
    # waits behind the other, so no array holds its priority
    late = request("late", [1], 1, priority=-(2**80))
    script = [(-(2**63) / MS, [Arrived(request("a", [1], 3)), Arrived(late)]), (2**63 / MS, [])]
    history = run_script(ONE_ROW, script)
    assert (
        history.make_series()["at"].tolist() == [0, 2**62]
        and measure(history).ttft == (2**62 / 1e9,) * 2
    )
    header = {"model": "toy", "headstock": "1", "scheduler": "mixed", "cache": None}
    assert f'"priority":["0","{-(2**80)}"]' in render_html(
        collect_page_data(history, header, "fine")
    )
