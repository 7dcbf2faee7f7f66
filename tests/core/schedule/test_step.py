"""What one step, or a few, must do."""

from __future__ import annotations

import numpy as np
import pytest

from headstock.errors import PluginBroken
from headstock.schedule import Aborted, Column, Failed, Plan, initial, refusal, step
from headstock.schedule.check import check
from headstock.spi import Budget, Choice, KVGroup, View

from .toy import Drive, alone, next_token
from .workloads import FULL, SCHEDULERS, limits, prompt, request, window

RNG = np.random.default_rng(7)


@pytest.fixture(autouse=True)
def drawn_anew() -> None:
    """What a test draws does not depend on who ran before it."""
    RNG.bit_generator.state = np.random.default_rng(7).bit_generator.state


def run(drive: Drive, *requests) -> Drive:
    """Submit and drain."""
    for one in requests:
        drive.submit(one)
    drive.drain()
    return drive


@pytest.mark.parametrize("cap", [1, 3, 8])
def test_T1_never_more_rows_than_seats_and_all_finish(cap: int) -> None:
    drive = Drive(limits(max_rows=cap))
    requests = [request(str(i), prompt(RNG, 5 + i), 6) for i in range(20)]
    for one in requests:
        drive.submit(one)
    while drive.busy:
        drive.step()
        assert drive.state.num_running <= cap

    assert drive.outputs == {one.id: alone(one) for one in requests}


def test_T6_a_full_pool_preempts_and_the_output_stays_the_same() -> None:
    requests = [request(str(i), prompt(RNG, 30), 60) for i in range(6)]
    roomy = run(Drive(limits(num_pages=400)), *requests)
    tight = run(Drive(limits(num_pages=30)), *requests)

    assert roomy.state.num_preempted == 0 and tight.state.num_preempted > 0
    assert tight.outputs == roomy.outputs


def test_T7_a_new_request_joins_while_others_decode() -> None:
    drive = Drive(limits())
    drive.submit(request("a", prompt(RNG, 8), 30))
    for _ in range(5):
        drive.step()
    drive.submit(request("b", prompt(RNG, 12), 5))
    plan = drive.step()

    assert plan.num_decode == 1 and (plan.stops - plan.starts).tolist() == [1, 12]


def test_T12_T15_equal_prompts_compute_the_tail_only_and_share_pages() -> None:
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
        drive.submit(request(name, tokens, 20, prompt_logprobs=True))  # so that neither may wait for the other
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


def test_T14_recomputing_everything_gives_the_same_tokens_without_hits() -> None:
    requests = [request(str(i), prompt(RNG, 10 + i), 12) for i in range(4)]
    drive = Drive(limits(policy=None, recompute=True))
    for one in requests:
        drive.submit(one)
    drive.step()
    plan = drive.step()

    assert plan.starts.tolist() == [0, 0, 0, 0]
    drive.drain()
    assert drive.outputs == {one.id: alone(one) for one in requests}


@pytest.mark.parametrize("budget", [1, 2, 7, 16, 100])
def test_P10_S6_a_long_prompt_is_cut_into_chunks_that_partition_it(budget: int) -> None:
    one = request("a", prompt(RNG, 90), 8)
    drive = run(Drive(limits(max_batch_tokens=budget, max_rows=1)), one)
    spans = [(int(s), int(t)) for plan in drive.plans for s, t in zip(plan.starts, plan.stops, strict=True)]

    assert [start for start, _ in spans[1:]] == [stop for _, stop in spans[:-1]] and spans[0][0] == 0
    assert all(plan.num_tokens <= budget for plan in drive.plans)
    assert drive.outputs["a"] == alone(one)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_H15_decode_rows_are_never_starved_by_prefill(scheduler: str) -> None:
    drive = Drive(limits(scheduler=scheduler, max_batch_tokens=16, max_rows=6, num_pages=2000))
    drive.submit(request("steady", prompt(RNG, 4), 100))
    drive.step()
    waits, waited = [], 0
    for number in range(200):
        if number % 2 == 0:
            drive.submit(request(str(number), prompt(RNG, 60), 2))
        if "steady" in drive.reasons:
            break
        before = len(drive.outputs["steady"])
        drive.step()
        waited = 0 if len(drive.outputs["steady"]) > before else waited + 1
        waits.append(waited)

    assert max(waits) <= (28 if scheduler == "equal-length" else 6)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_prompts_are_never_starved_by_decode_rows(scheduler: str) -> None:
    drive = Drive(limits(scheduler=scheduler, max_rows=4))
    for number in range(3):
        drive.submit(request(f"old{number}", prompt(RNG, 4), 120))
    for _ in range(4):
        drive.step()
    drive.submit(request("new", prompt(RNG, 20), 2))
    for _ in range(12):
        drive.step()

    assert drive.outputs["new"], f"{scheduler} left a prompt waiting for 12 steps"


def test_I17_I18_higher_priority_goes_first_then_first_come() -> None:
    drive = Drive(limits(max_rows=1))
    for name, priority in (("a", 0), ("b", 0), ("c", 1), ("d", 1)):
        drive.submit(request(name, prompt(RNG, 5), 3, priority=priority))
    drive.drain()

    assert list(drive.reasons) == ["c", "d", "a", "b"]


def test_a_waiting_request_of_higher_priority_takes_a_seat() -> None:
    drive = Drive(limits(max_rows=1))
    low = request("low", prompt(RNG, 9), 30)
    drive.submit(low)
    for _ in range(5):
        drive.step()
    drive.submit(request("high", prompt(RNG, 9), 3, priority=5))
    drive.drain()

    assert list(drive.reasons) == ["high", "low"] and drive.outputs["low"] == alone(low)


def test_victims_are_of_lower_rank_and_the_oldest_is_never_preempted() -> None:
    drive = Drive(limits(num_pages=45, max_rows=6))
    requests = [request(str(i), prompt(RNG, 20), 100) for i in range(6)]
    for one in requests:
        drive.submit(one)
    while drive.busy:
        drive.step()
        for entry in drive.state.waiting:
            older = [seat for seat in drive.state.seats if seat is not None and seat.rank > entry.rank]
            assert not older or not entry.preemptions or not drive.state.num_running, "preempted for a younger one"
        entries = [entry for entry in (*drive.state.waiting, *drive.state.seats) if entry is not None]
        assert not any(entry.preemptions for entry in entries if entry.request.id == "0"), "the oldest was preempted"

    assert drive.state.num_preempted > 0
    assert drive.outputs == {one.id: alone(one) for one in requests}


def test_I9_stop_ids_count_only_once_min_tokens_are_out() -> None:
    tokens = prompt(RNG, 10)
    output = alone(request("x", tokens, 20))
    stop = output[3]
    first = output.index(stop) + 1
    drive = run(
        Drive(limits()),
        request("a", tokens, 20, stop_ids=(stop,)),
        request("b", tokens, 20, stop_ids=(stop,), min_tokens=20),
    )

    assert len(drive.outputs["a"]) == first and drive.reasons["a"] == "stop"
    assert len(drive.outputs["b"]) == 20, "a stop id counted before min_tokens were out"


@pytest.mark.parametrize("at", ["queued", "prefill", "decode", "ended", "unknown", "twice"])
def test_C2_abort_anywhere_gives_everything_back(at: str) -> None:
    drive = Drive(limits(max_batch_tokens=8))
    if at not in ("unknown",):
        drive.submit(request("a", prompt(RNG, 30), 10))
    for _ in range({"queued": 0, "prefill": 2, "decode": 8, "ended": 40}.get(at, 3)):
        drive.step()
    drive.events.append(Aborted("a"))
    if at == "twice":
        drive.events.append(Aborted("a"))
    drive.drain()

    check(drive.state, drive.limits)
    assert not np.count_nonzero(drive.state.refs[0])
    assert drive.reasons.get("a") == {"ended": "length", "unknown": None}.get(at, "abort")


def test_C2_a_preempted_request_that_is_aborted_while_it_waits_ends_with_what_it_said() -> None:
    drive = Drive(limits(num_pages=30))
    for i in range(6):
        drive.submit(request(str(i), prompt(RNG, 30), 60))
    while not drive.state.num_preempted:
        drive.step()
    (entry,) = [entry for entry in drive.state.waiting if entry.preemptions]
    drive.events.append(Aborted(entry.request.id))
    drive.step()

    (ended,) = drive.state.ended
    assert (ended.id, ended.reason, ended.preemptions) == (entry.request.id, "abort", 1), "it waits on though aborted"
    assert ended.tokens.tolist() == entry.tokens.tolist() and len(ended.tokens) > 30
    drive.drain()


def test_C4_abort_takes_the_whole_id() -> None:
    drive = Drive(limits())
    for name in ("1", "10", "100"):
        drive.submit(request(name, prompt(RNG, 6), 8))
    drive.step()
    drive.events.append(Aborted("1"))
    drive.drain()

    assert drive.reasons == {"1": "abort", "10": "length", "100": "length"}, "another one was aborted"


def test_I15_failed_rows_end_alone_and_late_news_is_dropped() -> None:
    drive = Drive(limits(overlap=True, max_rows=2))
    requests = [request(name, prompt(RNG, 6), 8) for name in "abc"]
    for one in requests:
        drive.submit(one)
    plan = drive.step()
    drive.events = [Failed(plan.rows[:1], plan.orders[:1])]
    assert drive.step().joined.tolist() == plan.rows[:1].tolist()  # the plan flies while "c" takes the seat of "a"
    drive.drain()

    assert drive.reasons == {"a": "error", "b": "length", "c": "length"}
    assert drive.outputs == {"a": []} | {one.id: alone(one) for one in requests[1:]}, "wrong tokens"


def test_I15_what_a_running_step_computes_is_found_only_once_it_is_done() -> None:
    tokens = prompt(RNG, 20)
    drive = Drive(limits(overlap=True, max_batch_tokens=8))
    drive.submit(request("a", tokens))
    first = drive.step()
    drive.step()  # the first eight tokens are being computed
    drive.events = [Failed(first.rows, first.orders)]  # and are no good
    drive.submit(request("b", tokens))

    assert drive.step().starts.tolist() == [0], "pages were shared that had yet to be computed"


def test_S18_overlap_gives_the_same_tokens_and_wastes_at_most_a_step_a_request() -> None:
    requests = [
        request(str(i), prompt(RNG, 5 + i % 40), 30, stop_ids=(i % 7, 7 + i % 9), priority=i % 2) for i in range(48)
    ]
    plain = run(Drive(limits(num_pages=70)), *requests)
    overlapped = run(Drive(limits(num_pages=70, overlap=True)), *requests)

    assert overlapped.outputs == plain.outputs == {one.id: alone(one) for one in requests}
    assert overlapped.state.num_preempted > 0
    roomy = [run(Drive(limits(num_pages=800, overlap=overlap)), *requests) for overlap in (False, True)]
    computed = [sum(plan.num_tokens for plan in drive.plans) for drive in roomy]
    assert not any(drive.state.num_preempted for drive in roomy)
    assert computed[0] < computed[1] <= computed[0] + len(requests)


def test_S18_the_next_plan_is_made_before_the_last_token_is_known() -> None:
    drive = Drive(limits(overlap=True))
    drive.submit(request("a", prompt(RNG, 6), 8))
    first, second = drive.step(), drive.step()

    assert (first.starts.tolist(), first.stops.tolist()) == ([0], [6])
    assert (second.starts.tolist(), second.stops.tolist()) == ([6], [7]) and not drive.outputs["a"]


def test_a_fenced_row_waits_for_its_token_and_others_go_on() -> None:
    drive = Drive(limits(overlap=True))
    drive.submit(request("fenced", prompt(RNG, 6), 8, fenced=True))
    drive.submit(request("free", prompt(RNG, 6), 8))
    plans = [drive.step() for _ in range(6)]

    assert [len(plan.rows) for plan in plans] == [2, 1, 2, 1, 2, 1]
    drive.drain()
    assert drive.outputs["fenced"] == alone(request("x", drive.device.requests[0].prompt, 8))


def test_C3_what_can_never_fit_is_refused_with_both_numbers() -> None:
    bounds = limits(num_pages=10, max_len=1000)
    assert refusal(request("a", prompt(RNG, 30), 11), bounds) is None
    reason = refusal(request("a", prompt(RNG, 30), 12), bounds)

    assert reason is not None and "11 pages" in reason and "10" in reason
    drive = Drive(bounds)
    for name, length, most in (("too big", 41, 1), ("just fits", 40, 1), ("huge", 100, 12), ("small", 5, 3)):
        drive.submit(request(name, prompt(RNG, length), most))
    drive.drain(50)
    assert drive.reasons == {"too big": "error", "huge": "error", "just fits": "length", "small": "length"}


def test_S22_a_prompt_longer_than_a_sequence_may_be_is_refused_with_both_numbers() -> None:
    bounds = limits(max_len=20)

    assert refusal(request("a", prompt(RNG, 19), 1), bounds) is None
    assert "20" in str(refusal(request("a", prompt(RNG, 20), 1), bounds))
    assert "21" in str(refusal(request("a", prompt(RNG, 19), 2), bounds))
    assert "empty" in str(refusal(request("a", [], 1), bounds))


def test_a_step_leaves_the_state_it_was_given_as_it_was() -> None:
    drive = Drive(limits(num_pages=30))
    for number in range(5):
        drive.submit(request(str(number), prompt(RNG, 20), 40))
    for _ in range(30):
        old = drive.state
        copies = (old.columns.copy(), old.stop_ids.copy(), old.spans.copy(), old.free)
        free, seats, waiting = [part.copy() for part in old.free[0]], old.seats, old.waiting
        drive.step()
        assert (old.columns == copies[0]).all() and (old.stop_ids == copies[1]).all()
        assert (old.spans == copies[2]).all() and old.free is copies[3]
        assert all((a == b).all() for a, b in zip(old.free[0], free, strict=True))
        assert old.seats is seats and old.waiting is waiting
        with pytest.raises(ValueError, match="read-only"):
            drive.state.columns[Column.NUM_KNOWN, 0] = 1


def test_plans_survive_encoding_and_nonsense_does_not_decode() -> None:
    drive = Drive(limits())
    drive.submit(request("a", prompt(RNG, 20), 5))
    plan = drive.step()
    again = Plan.decode(plan.encode())

    assert again.encode() == plan.encode() and again.joined.tolist() == [0]
    with pytest.raises(ValueError, match="not an encoded plan"):
        Plan.decode(plan.encode()[:-4])


ILLEGAL = {
    "rows but": lambda view: Choice(rows=view.ranked, counts=np.zeros(0, np.int32)),
    "does not exist": lambda view: Choice(rows=np.array([99]), counts=np.array([1])),
    "twice": lambda view: Choice(rows=np.array([0, 0]), counts=np.array([1, 1])),
    "wants fewer": lambda view: Choice(rows=view.ranked, counts=view.want[view.ranked] + 1),
    "waiting positions": lambda view: Choice(rows=view.ranked[:0], counts=view.want[:0], admit=np.array([5])),
    "victim": lambda view: Choice(rows=view.ranked[:0], counts=view.want[:0], victims=np.array([7])),
}


@pytest.mark.parametrize("fault", ILLEGAL)
def test_an_illegal_choice_is_an_error_that_names_the_scheduler(fault: str) -> None:
    def choose(view: View, budget: Budget) -> Choice:
        if not len(view.ranked):
            return Choice(rows=view.ranked, counts=view.ranked, admit=np.arange(len(view.waiting_lengths)))
        return ILLEGAL[fault](view)

    drive = Drive(limits(choose=choose, scheduler="mixed"))
    drive.submit(request("a", prompt(RNG, 8), 5))
    drive.step()
    with pytest.raises(PluginBroken, match=f"'mixed' chose .*{fault}"):
        drive.step()


def test_victims_that_a_scheduler_names_are_preempted_and_finish_later() -> None:
    calls = []

    def choose(view: View, budget: Budget) -> Choice:
        calls.append(1)
        if len(calls) == 6:
            return Choice(rows=view.ranked[:1], counts=view.want[view.ranked[:1]], victims=view.ranked[1:])
        return SCHEDULERS["mixed"](view, budget)

    drive = Drive(limits(choose=choose))
    requests = [request(str(i), prompt(RNG, 8), 12) for i in range(3)]
    run(drive, *requests)

    assert drive.state.num_preempted == 2
    assert drive.outputs == {one.id: alone(one) for one in requests}


def test_a_scheduler_that_runs_the_lowest_rank_alone_cannot_stall_a_full_pool() -> None:
    def choose(view: View, budget: Budget) -> Choice:
        rows = view.ranked[-1:] if view.want[view.ranked[-1:]].any() else view.ranked[:0]
        admit = np.arange(len(view.waiting_lengths))
        return Choice(rows=rows, counts=np.minimum(view.want[rows], budget.tokens), admit=admit)

    requests = [request(str(i), prompt(RNG, 30), 40) for i in range(3)]
    drive = Drive(limits(choose=choose, num_pages=20, policy=None))
    for one in requests:
        drive.submit(one)
    drive.drain(500)

    assert drive.state.num_preempted > 0 and drive.outputs == {one.id: alone(one) for one in requests}


def test_a_window_group_frees_what_lies_behind_its_window() -> None:
    bounds = limits(groups=(FULL, window(10)), num_pages=40)
    drive = Drive(bounds)
    one = request("a", prompt(RNG, 50), 60)
    drive.submit(one)
    most = 0
    while drive.busy:
        drive.step()
        most = max(most, len(drive.state.pages[1][0]))

    assert drive.outputs["a"] == alone(one)
    assert len(drive.plans) > 50 and most <= 13 + 1 and drive.state.num_free[1] == 40


@pytest.mark.parametrize("groups", [(FULL,), (FULL, window(3))], ids=["full", "window"])
@pytest.mark.parametrize("overlap", [True, False])
def test_drafts_change_nothing_but_the_number_of_steps(groups: tuple[KVGroup, ...], overlap: bool) -> None:
    bounds = limits(groups=groups, page_size=1, num_pages=400, overlap=overlap)
    requests = [request(str(i), prompt(RNG, 10), 40, fenced=True) for i in range(4)]
    plain = run(Drive(bounds), *requests)
    drafted = run(Drive(bounds, np.random.default_rng(3)), *requests)

    assert drafted.outputs == plain.outputs == {one.id: alone(one) for one in requests}, "wrong tokens"
    assert len(drafted.plans) < len(plain.plans)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_that_runs_nothing_loses_no_page_table_entry(overlap: bool) -> None:
    def choose(view: View, budget: Budget) -> Choice:
        rests = view.number % 2
        return Choice(rows=view.ranked[:0], counts=view.ranked[:0]) if rests else SCHEDULERS["mixed"](view, budget)

    tokens = prompt(RNG, 40)  # whoever says the same moves to the same pages
    requests = [request(str(i), tokens, 5 + 5 * i) for i in range(12)]
    drive = run(Drive(limits(choose=choose, num_pages=200, overlap=overlap)), *requests)

    assert drive.outputs == {one.id: alone(one) for one in requests}, "wrong tokens"


def test_scored_prompts_ignore_hits_and_score_every_position_once() -> None:
    tokens = prompt(RNG, 30)
    drive = run(Drive(limits(max_batch_tokens=8)), request("a", tokens, 2))
    first = len(drive.plans)
    run(drive, request("b", tokens, 2, prompt_logprobs=True))
    scored = sum(int(plan.num_logits[0]) for plan in drive.plans[first:] if len(plan.rows) and plan.starts[0] < 30)

    assert scored == 30


def test_namespaces_share_nothing() -> None:
    tokens = prompt(RNG, 20)
    drive = run(Drive(limits()), request("a", tokens, 2, namespace="one"))
    drive.submit(request("b", tokens, 2, namespace="two"))

    assert drive.step().starts.tolist() == [0], "it found what another tenant computed"


def test_a_fresh_state_is_sound_and_idle_steps_do_nothing() -> None:
    bounds = limits()
    state, plan = step(initial(bounds), (), bounds)
    check(state, bounds)

    assert not len(plan.rows) and plan.num_tokens == 0
    assert next_token([1, 2]) != next_token([2, 1])
