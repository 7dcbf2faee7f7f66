"""The queue against a sorted list."""

from __future__ import annotations

import numpy as np
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from toy_workloads import request

from headstock.scheduler import RequestState, waiting_queue

PROMPT = np.ones(1, np.int32)
DONE = st.lists(
    st.one_of(st.integers(-2, 2), st.sets(st.integers(0, 30), min_size=1, max_size=6)), max_size=400
)


def entry(arrival: int, priority: int) -> RequestState:
    """An entry with this priority key."""
    return RequestState(
        request=evolve(request("x", PROMPT), priority=priority), tokens=PROMPT, arrival=arrival
    )


@given(DONE)
def test_a_queue_is_a_sorted_list_and_old_ones_stay(done: list[int | set[int]]) -> None:
    now, model = waiting_queue.WaitingQueue(), []
    for arrival, each in enumerate(done):
        before, kept = now, list(now)
        if isinstance(each, int):
            now = now.put(entry(arrival, each))
            model = sorted([*model, (-each, arrival)])
        else:
            gone = {key for place, key in enumerate(model) if place in each}
            now = now.without({arrival for _, arrival in gone})
            model = [key for key in model if key not in gone]
        assert list(before) == kept
        assert [one.priority_key for one in now] == model and len(now) == len(model)
        assert [one.priority_key for one in now.first(5)] == model[:5]
        assert all(0 < len(part) <= waiting_queue.MAX_PART for part in now.parts)
    assert not model or now.head.priority_key == model[0]


def test_a_preempted_entry_goes_between_those_that_came_before_and_after() -> None:
    now = waiting_queue.WaitingQueue()
    for arrival in range(0, 1000, 2):
        now = now.put(entry(arrival, 0))
    now = now.put(entry(501, 0)).put(entry(-1, 0)).put(entry(2000, 1))

    assert [one.arrival for one in now] == [2000, *sorted([-1, 501, *range(0, 1000, 2)])]
