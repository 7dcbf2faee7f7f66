"""Who leaves, and who never gets in: stop ids, aborts, failures, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from toy_workloads import limits, prompt, request

from headstock.scheduler import Aborted, Failed, find_refusal
from headstock.scheduler.invariants import check_state
from headstock_conformance.scheduler.toy_device import alone
from headstock_conformance.scheduler.toy_schedule import Drive, run

SEED = 7
RNG = np.random.default_rng(SEED)


@pytest.mark.feature("I9")
def test_stop_ids_count_only_once_min_tokens_are_out() -> None:
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


@pytest.mark.feature("C2")
@pytest.mark.parametrize("at", ["queued", "prefill", "decode", "ended", "unknown", "twice"])
def test_abort_anywhere_gives_everything_back(at: str) -> None:
    drive = Drive(limits(max_batch_tokens=8))
    if at not in ("unknown",):
        drive.submit(request("a", prompt(RNG, 30), 10))
    for _ in range({"queued": 0, "prefill": 2, "decode": 8, "ended": 40}.get(at, 3)):
        drive.step()
    drive.events.append(Aborted("a"))
    if at == "twice":
        drive.events.append(Aborted("a"))
    drive.drain()

    check_state(drive.state, drive.limits)
    assert not np.count_nonzero(drive.state.refs[0])
    assert drive.reasons.get("a") == {"ended": "length", "unknown": None}.get(at, "abort")


@pytest.mark.feature("C2")
def test_a_preempted_request_that_is_aborted_while_it_waits_ends_with_what_it_said() -> None:
    drive = Drive(limits(num_pages=30))
    for i in range(6):
        drive.submit(request(str(i), prompt(RNG, 30), 60))
    while not drive.state.num_preempted:
        drive.step()
    (entry,) = [entry for entry in drive.state.waiting if entry.preemptions]
    drive.events.append(Aborted(entry.request.id))
    drive.step()

    assert [each.id for each in drive.state.ended] == [entry.request.id], (
        "it waits on though aborted"
    )
    (ended,) = drive.state.ended
    assert (ended.reason, ended.preemptions) == ("abort", 1)
    assert ended.tokens.tolist() == entry.tokens.tolist() and len(ended.tokens) > 30
    drive.drain()


@pytest.mark.feature("C4")
def test_abort_takes_the_whole_id() -> None:
    drive = Drive(limits())
    for name in ("1", "10", "100"):
        drive.submit(request(name, prompt(RNG, 6), 8))
    drive.step()
    drive.events.append(Aborted("1"))
    drive.drain()

    assert drive.reasons == {"1": "abort", "10": "length", "100": "length"}, (
        "another one was aborted"
    )


@pytest.mark.feature("I15")
def test_failed_rows_end_alone_and_late_news_is_dropped() -> None:
    drive = Drive(limits(overlap=True, max_rows=2))
    requests = [request(name, prompt(RNG, 6), 8) for name in "abc"]
    for one in requests:
        drive.submit(one)
    plan = drive.step()
    drive.events = [Failed(plan.rows[:1], plan.admission_ids[:1])]
    # the plan is in flight while "c" takes the row of "a"
    assert drive.step().new_row_ids.tolist() == plan.rows[:1].tolist()
    drive.drain()

    assert drive.reasons == {"a": "error", "b": "length", "c": "length"}
    assert drive.outputs == {"a": []} | {one.id: alone(one) for one in requests[1:]}, "wrong tokens"


@pytest.mark.feature("I15")
def test_what_a_running_step_computes_is_found_only_once_it_is_done() -> None:
    tokens = prompt(RNG, 20)
    drive = Drive(limits(overlap=True, max_batch_tokens=8))
    drive.submit(request("a", tokens))
    first = drive.step()
    drive.step()  # the first eight tokens are being computed
    drive.events = [Failed(first.rows, first.admission_ids)]  # and are no good
    drive.submit(request("b", tokens))

    assert drive.step().starts.tolist() == [0], "pages were shared that had yet to be computed"


@pytest.mark.feature("C3")
def test_what_can_never_fit_is_refused_with_both_numbers() -> None:
    bounds = limits(num_pages=10, max_len=1000)
    assert find_refusal(request("a", prompt(RNG, 30), 11), bounds) is None
    reason = find_refusal(request("a", prompt(RNG, 30), 12), bounds)

    assert reason is not None and "11 pages" in reason and "10" in reason
    drive = Drive(bounds)
    for name, length, most in (
        ("too big", 41, 1),
        ("just fits", 40, 1),
        ("huge", 100, 12),
        ("small", 5, 3),
    ):
        drive.submit(request(name, prompt(RNG, length), most))
    drive.drain(50)
    assert drive.reasons == {
        "too big": "error",
        "huge": "error",
        "just fits": "length",
        "small": "length",
    }


@pytest.mark.feature("S22")
def test_a_prompt_longer_than_a_sequence_may_be_is_refused_with_both_numbers() -> None:
    bounds = limits(max_len=20)

    assert find_refusal(request("a", prompt(RNG, 19), 1), bounds) is None
    assert "20" in str(find_refusal(request("a", prompt(RNG, 20), 1), bounds))
    assert "21" in str(find_refusal(request("a", prompt(RNG, 19), 2), bounds))
    assert "empty" in str(find_refusal(request("a", [], 1), bounds))
