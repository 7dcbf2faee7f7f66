"""Pages: how many a request holds, which, and where they are when nobody holds them."""

from __future__ import annotations

import numpy as np
from core.properties.drawn import EXAMPLES, engines, free, held, requests, run
from core.schedule.toy import Drive, alone
from hypothesis import given
from hypothesis import strategies as st

from headstock.schedule import Aborted, Column, Event, Failed, Limits, Request, State


def sizes(state: State) -> dict[int, tuple[int, int]]:
    """Computed tokens and held pages of each taken seat, by admission number."""
    columns = state.columns
    return {
        int(columns[Column.ORDER, row]): (int(columns[Column.NUM_COMPUTED, row]), len(pages))
        for row, pages in held(state).items()
    }


@EXAMPLES
@given(bounds=engines(), asked=requests(), gap=st.integers(1, 4))
def test_I2_a_request_of_n_tokens_holds_n_by_page_size_pages_rounded_up(
    bounds: Limits, asked: list[Request], gap: int
) -> None:
    def see(drive: Drive) -> None:
        for row, pages in held(drive.state).items():
            tokens = int(drive.state.columns[Column.NUM_COMPUTED, row])
            assert len(pages) == -(-tokens // bounds.page_size)

    run(bounds, asked, see, gap)


@EXAMPLES
@given(bounds=engines(), asked=requests(), gap=st.integers(1, 4))
def test_I3_pages_of_a_request_all_differ_and_requests_share_equal_beginnings_only(
    bounds: Limits, asked: list[Request], gap: int
) -> None:
    def see(drive: Drive) -> None:
        state, size = drive.state, bounds.page_size
        owners: dict[int, tuple[int, str, bytes]] = {}
        for row, pages in held(state).items():
            assert len(set(pages)) == len(pages)
            entry = state.seats[row]
            assert entry is not None
            for place, page in enumerate(pages):
                begins = state.tokens[row, : (place + 1) * size].tobytes()
                owner = place, entry.request.namespace, begins
                assert owners.setdefault(page, owner) == owner, "two requests hold a page that is not the same to both"

    run(bounds, asked, see, gap)


@EXAMPLES
@given(bounds=engines(), asked=requests(), gap=st.integers(1, 4))
def test_I4_a_request_gets_a_page_when_it_passes_a_boundary_and_never_else(
    bounds: Limits, asked: list[Request], gap: int
) -> None:
    last: dict[int, tuple[int, int]] = {}

    def see(drive: Drive) -> None:
        now = sizes(drive.state)
        for order in now.keys() & last.keys():
            (tokens, pages), (tokens_now, pages_now) = last[order], now[order]
            boundaries = sum(token % bounds.page_size == 0 for token in range(tokens, tokens_now))
            assert pages_now - pages == boundaries
            assert tokens_now > tokens + 1 or boundaries <= 1
        last.clear()
        last.update(now)

    run(bounds, asked, see, gap)


@EXAMPLES
@given(bounds=engines(), asked=requests(), gap=st.integers(1, 4))
def test_I5_every_page_is_free_or_held_or_cached_at_every_moment(
    bounds: Limits, asked: list[Request], gap: int
) -> None:
    def see(drive: Drive) -> None:
        for group, total in enumerate(bounds.num_pages):
            taken = {page for pages in held(drive.state, group).values() for page in pages}
            idle = free(drive.state, group)
            indexed: set[int] = set()
            if bounds.policy is not None:
                indexed = set(bounds.policy.pages(drive.state.index).tolist())
            assert len(set(idle)) == len(idle) == drive.state.num_free[group]
            assert not set(idle) & (taken | indexed)
            assert set(idle) | taken | indexed == set(range(1, total + 1))

    drive = run(bounds, asked, see, gap)
    assert not any(held(drive.state).values())


TIMES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5), st.sampled_from(["abort", "fail"])), max_size=6)


def treated(bounds: Limits, asked: list[Request], ends: list[tuple[int, int, str]], times: int) -> Drive:
    """A run in which some requests are aborted or fail, each of which the scheduler is told so many times."""
    drive = Drive(bounds)
    for one in asked:
        drive.submit(one)
    while drive.busy:
        news: list[Event] = []
        for at, which, kind in ends:
            if at != len(drive.plans):
                continue
            rows = np.array([which % bounds.max_rows], np.int32)
            orders = drive.state.columns[Column.ORDER, rows]
            if kind == "abort":
                news.append(Aborted(str(which)))
            elif orders[0]:
                news.append(Failed(rows, orders))
        drive.events += news * times
        drive.step()
        late = [event for event in news if isinstance(event, Failed)]
        drive.events += late * (times - 1)  # of rows that are gone, or others' by now
    return drive


@EXAMPLES
@given(bounds=engines(), asked=requests(), ends=TIMES, times=st.integers(2, 3))
def test_I22_what_is_given_back_twice_is_free_once(
    bounds: Limits, asked: list[Request], ends: list[tuple[int, int, str]], times: int
) -> None:
    once, again = treated(bounds, asked, ends, 1), treated(bounds, asked, ends, times)

    assert again.reasons == once.reasons and again.outputs == once.outputs
    for group in range(len(bounds.groups)):
        assert sorted(free(again.state, group)) == sorted(free(once.state, group))
    for one in asked:
        assert alone(one)[: len(once.outputs[one.id])] == once.outputs[one.id]


@EXAMPLES
@given(bounds=engines(), asked=requests(), gap=st.integers(1, 4))
def test_I23_the_padding_page_is_never_handed_out(bounds: Limits, asked: list[Request], gap: int) -> None:
    written = 0

    def see(drive: Drive) -> None:
        nonlocal written
        plan = drive.plans[-1]
        full = plan.page_groups == 0  # a group with a window is told 0 for pages behind it
        assert (plan.page_numbers[full] > 0).all()
        written += len(plan.page_numbers)
        for group in range(len(bounds.groups)):
            assert 0 not in free(drive.state, group) and not drive.state.refs[group][0]
        if bounds.policy is not None:
            assert 0 not in bounds.policy.pages(drive.state.index)

    run(bounds, asked, see, gap)
    assert written
