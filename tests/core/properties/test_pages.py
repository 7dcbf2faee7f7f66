"""Pages: how many a request holds, which, and where they are when no row holds them."""

from __future__ import annotations

import numpy as np
import pytest
from core.properties.drawn import EXAMPLES, engines, free, held, requests, run
from hypothesis import example, given
from hypothesis import strategies as st
from toy_workloads import limits, request

from headstock.scheduler import Aborted, Event, Failed, Limits, Request, RowCounter, State
from headstock_conformance.scheduler.toy_device import alone
from headstock_conformance.scheduler.toy_schedule import Drive

Sizes = dict[int, tuple[int, int]]
"""Computed tokens and held pages of requests, by admission id."""


def sizes(state: State) -> Sizes:
    """Return those of each row in use."""
    counters = state.row_counters
    return {
        int(counters[RowCounter.ADMISSION_ID, row]): (
            int(counters[RowCounter.NUM_COMPUTED, row]),
            len(pages),
        )
        for row, pages in held(state).items()
    }


def rounded_up(drive: Drive, last: Sizes) -> None:
    """I2: n computed tokens hold n / page size pages, rounded up."""
    for tokens, pages in sizes(drive.state).values():
        assert pages == -(-tokens // drive.limits.page_size)


def distinct(drive: Drive, last: Sizes) -> None:
    """I3: pages of a request all differ; two requests share a page for an equal beginning only."""
    state, size = drive.state, drive.limits.page_size
    owners: dict[int, tuple[int, str, bytes]] = {}
    for row, pages in held(state).items():
        assert len(set(pages)) == len(pages)
        entry = state.requests_by_row[row]
        assert entry is not None
        for place, page in enumerate(pages):
            owner = (
                place,
                entry.request.prefix_namespace,
                state.tokens[row, : (place + 1) * size].tobytes(),
            )
            assert owners.setdefault(page, owner) == owner, (
                "two requests hold a page that is not the same to both"
            )


def grown_at_boundaries(drive: Drive, last: Sizes) -> None:
    """I4: a request gets a page when it passes a boundary, and never else."""
    now, size = sizes(drive.state), drive.limits.page_size
    for admission_id in now.keys() & last.keys():
        (tokens, pages), (tokens_now, pages_now) = last[admission_id], now[admission_id]
        boundaries = sum(token % size == 0 for token in range(tokens, tokens_now))
        assert pages_now - pages == boundaries
        assert tokens_now > tokens + 1 or boundaries <= 1


def conserved(drive: Drive, last: Sizes) -> None:
    """I5: every page is free, or held, or cached; none is free twice, and none is lost."""
    policy = drive.limits.policy
    for group, total in enumerate(drive.limits.num_pages):
        idle = free(drive.state, group)
        used = {page for pages in held(drive.state, group).values() for page in pages}
        if policy is not None:
            used |= set(policy.indexed_pages(drive.state.index, group).tolist())
        assert len(set(idle)) == len(idle) == drive.state.num_free[group], (
            "a page is free twice, or miscounted"
        )
        assert not set(idle) & used, "a free page is in use"
        assert set(idle) | used == set(range(1, total + 1)), "a page is lost"


def without_the_padding_page(drive: Drive, last: Sizes) -> None:
    """I23: no row or free list has page 0, and plans write it only behind a window."""
    plan = drive.plans[-1]
    assert (plan.page_numbers[plan.page_groups == 0] > 0).all()
    for group in range(len(drive.limits.groups)):
        assert 0 not in free(drive.state, group)
        assert not any(0 in pages for pages in held(drive.state, group).values())


HALF_A_PAGE_ALIKE = [request("0", range(8), 30), request("1", [0, 1, 2, 3, 4, 9, 9, 9, 1], 30)]


@pytest.mark.feature("I2", "I3", "I4", "I5", "I23")
@EXAMPLES
@given(bounds=engines(), asked=requests(), gap=st.integers(1, 4))
@example(bounds=limits(page_size=4, check=False), asked=HALF_A_PAGE_ALIKE, gap=4)
def test_pages_are_as_many_as_needed_distinct_and_never_lost(
    bounds: Limits, asked: list[Request], gap: int
) -> None:
    last: Sizes = {}

    def see(drive: Drive) -> None:
        for must_hold in (
            rounded_up,
            distinct,
            grown_at_boundaries,
            conserved,
            without_the_padding_page,
        ):
            must_hold(drive, last)
        last.clear()
        last.update(sizes(drive.state))

    drive = run(bounds, asked, see, gap)
    assert not any(held(drive.state).values())


TIMES = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 5), st.sampled_from(["abort", "fail"])), max_size=6
)


def treated(
    bounds: Limits, asked: list[Request], ends: list[tuple[int, int, str]], times: int
) -> Drive:
    """Run requests, some aborted or failed; the scheduler gets each such event `times` times."""
    drive = Drive(bounds)
    for one in asked:
        drive.submit(one)
    while drive.busy:
        events: list[Event] = []
        for at, which, kind in ends:
            if at != len(drive.plans):
                continue
            rows = np.array([which % bounds.max_rows], np.int32)
            admission_ids = drive.state.row_counters[RowCounter.ADMISSION_ID, rows]
            if kind == "abort":
                events.append(Aborted(str(which)))
            elif admission_ids[0]:
                events.append(Failed(rows, admission_ids))
        drive.events += events * times
        drive.step()
        assert len(drive.plans) < 5_000, "it does not end"
        late = [event for event in events if isinstance(event, Failed)]
        drive.events += late * (times - 1)  # of rows that are gone, or others' by now
    return drive


@pytest.mark.feature("I22")
@EXAMPLES
@given(bounds=engines(), asked=requests(), ends=TIMES, times=st.integers(2, 3))
def test_what_is_given_back_twice_is_free_once(
    bounds: Limits, asked: list[Request], ends: list[tuple[int, int, str]], times: int
) -> None:
    once, again = treated(bounds, asked, ends, 1), treated(bounds, asked, ends, times)

    assert again.reasons == once.reasons and again.outputs == once.outputs
    for group in range(len(bounds.groups)):
        assert sorted(free(again.state, group)) == sorted(free(once.state, group))
    for one in asked:
        assert alone(one)[: len(once.outputs[one.id])] == once.outputs[one.id]
