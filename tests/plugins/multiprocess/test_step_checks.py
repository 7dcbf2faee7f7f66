"""What ranks report of each step is compared: they go on together, or not at all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headstock_multiprocess.step_checks import SKEW_SECONDS, StepChecks

PATIENCE = 100.0


def make_checks(count: int = 3) -> StepChecks:
    return StepChecks(count, PATIENCE, "rank {}".format)


@given(st.data(), st.integers(2, 5))
def test_ranks_that_report_the_same_go_on_in_whatever_order_they_do(
    data: st.DataObject, count: int
) -> None:
    checks = make_checks(count)
    numbers = [checks.ask(0.0) for _ in range(3)]
    errors = data.draw(st.lists(st.sampled_from(["", "no kernel"]), min_size=3, max_size=3))
    # Each rank does its steps in their order; whose turn it is, is drawn.
    turns = data.draw(st.permutations([rank for rank in range(count) for _ in numbers]))
    done = [0] * count
    for now, rank in enumerate(turns):
        at = done[rank]
        done[rank] += 1
        checks.report(rank, numbers[at], 7 * at, errors[at], now / 1000)
        assert checks.find_fault(now / 1000) == ""
    assert all(map(checks.is_over, numbers)) and checks.find_fault(10 * PATIENCE) == ""


@given(st.data(), st.integers(2, 5))
def test_a_rank_with_another_result_is_named(data: st.DataObject, count: int) -> None:
    checks = make_checks(count)
    number, odd = checks.ask(0.0), data.draw(st.integers(1, count - 1))
    for rank in data.draw(st.permutations(range(count))):
        checks.report(rank, number, 1 + (rank == odd), "", 0.0)

    assert checks.find_fault(0.0) == f"rank {odd} got other results than rank 0 in a step"


def test_a_step_that_fails_on_one_rank_is_no_step_of_all() -> None:
    checks = make_checks()
    number = checks.ask(0.0)
    checks.report(0, number, 5, "", 1.0)
    checks.report(2, number, 0, "no kernel", 1.0)

    # The third rank may hang in a sum: nobody waits for it.
    assert checks.find_fault(1.0) == "rank 2 failed in a step: no kernel"


def test_ranks_that_fail_in_several_ways_have_parted() -> None:
    checks = make_checks(2)
    number = checks.ask(0.0)
    checks.report(0, number, 0, "out of memory: 3 MiB are free", 1.0)
    checks.report(1, number, 0, "out of memory: 2 MiB are free", 1.1)

    assert checks.find_fault(1.1) == "rank 0 failed in a step: out of memory: 3 MiB are free"


def test_ranks_that_fail_alike_may_do_so_one_after_the_other() -> None:
    checks = make_checks()
    number = checks.ask(0.0)
    checks.report(1, number, 0, "no kernel", 1.0)

    assert checks.find_fault(1.0 + SKEW_SECONDS) == ""
    assert checks.find_fault(1.1 + SKEW_SECONDS) == "rank 1 failed in a step: no kernel"


def test_a_step_that_does_not_end_names_the_ranks_that_have_not_done_it() -> None:
    checks = make_checks()
    first, second = checks.ask(0.0), checks.ask(50.0)
    checks.report(1, first, 3, "", 1.0)

    assert checks.find_fault(PATIENCE) == ""
    assert checks.find_fault(PATIENCE + 1) == "a step has not ended for 100 s on rank 0, rank 2"
    for rank in (0, 2):
        checks.report(rank, first, 3, "", PATIENCE + 1)
    assert checks.is_over(first) and not checks.is_over(second)
    assert checks.find_fault(PATIENCE + 1) == ""


def test_a_report_of_a_step_that_is_over_is_a_fault() -> None:
    checks = make_checks(2)
    number = checks.ask(0.0)
    for rank in (0, 1):
        checks.report(rank, number, 3, "", 0.0)
    checks.report(1, number, 3, "", 0.0)

    assert checks.find_fault(0.0) == "rank 1 reports step 1 twice"
