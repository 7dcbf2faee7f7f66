"""Invariants between consecutive states of a scheduler, in an engine or a test's drive."""

from __future__ import annotations

import numpy as np
from attrs import define, field

from headstock.scheduler import Limits, RequestState, RowCounter, State


@define
class TransitionChecker:
    """Checks every state of an engine against those before; starts with an empty engine.

    - A preempted request has a lower priority than all requests that keep their rows.
    - A request is preempted at most once for each request of higher priority that it met. It may be
      preempted once more for each that came later, which may take a row before it lacks pages.
    - Pages that a row starts on were computed for its own namespace.
    - Rows of a namespace with a common prefix share its pages, as far as these are indexed.

    Why the bound holds: a preempted request waits for room for all its tokens and for the needs of
    running rows. Once its pages are taken there is less. There is no more before a request of
    higher priority ends: requests are admitted by priority, and running ones only grow. Where
    drafts are rejected, rows shrink too: each token of a request of higher priority may then cost
    a preemption.
    """

    limits: Limits
    has_drafts: bool = False
    num_arrived: int = 0
    num_admitted: int = 0
    num_preempted: int = 0
    max_preemptions: dict[int, int] = field(factory=dict)
    preemptions: dict[int, int] = field(factory=dict)
    picked_arrivals: set[int] = field(factory=set)
    namespaces: list[str] = field(factory=lambda: [""])
    owners: list[np.ndarray] = field(init=False)

    def __attrs_post_init__(self) -> None:
        # by group and page, a place in `namespaces`
        self.owners = [np.zeros(count + 1, np.int32) for count in self.limits.num_pages]

    def check_state(self, state: State) -> None:
        """Raise AssertionError when the state may not follow those seen before."""
        request_states = [
            request_state
            for request_state in (*state.requests_by_row, *state.waiting)
            if request_state is not None
        ]
        if state.num_arrived != self.num_arrived:
            self.count_allowed(request_states)
        if state.num_preempted != self.num_preempted:
            self.check_preemptions(state, request_states)
        self.check_namespaces(state)
        if state.num_admitted != self.num_admitted:
            for group in range(len(self.owners)):
                if group not in self.limits.state_groups:
                    check_beginnings(state, group, self.limits.page_size)
        self.num_arrived, self.num_admitted = state.num_arrived, state.num_admitted
        self.num_preempted = state.num_preempted

    def count_allowed(self, request_states: list[RequestState]) -> None:
        """Count by arrival how often the live requests may preempt each other."""
        self.max_preemptions = {
            request_state.arrival: self.max_preemptions.get(request_state.arrival, 0)
            for request_state in request_states
        }
        self.preemptions = {
            request_state.arrival: self.preemptions.get(request_state.arrival, 0)
            for request_state in request_states
        }
        for new in request_states:
            for other in request_states if new.arrival > self.num_arrived else ():
                if other.arrival < new.arrival:
                    lower, higher, times = (
                        (new, other, 1)
                        if new.priority_key > other.priority_key
                        else (other, new, 2)
                    )
                    self.max_preemptions[lower.arrival] += (
                        higher.request.max_len if self.has_drafts else times
                    )

    def check_preemptions(self, state: State, request_states: list[RequestState]) -> None:
        """Check that the lowest in priority was preempted, and not too often."""
        rows = zip(
            state.requests_by_row, state.row_counters[RowCounter.ADMISSION_ID].tolist(), strict=True
        )
        stay = [
            request_state
            for request_state, admission_id in rows
            if request_state is not None and admission_id <= self.num_admitted
        ]
        for request_state in request_states:
            name, arrival = request_state.request.id, request_state.arrival
            if request_state.preemptions == self.preemptions[arrival]:
                continue
            self.preemptions[arrival] = request_state.preemptions
            is_picked = arrival in self.picked_arrivals
            self.picked_arrivals.discard(arrival)
            younger = [
                other.request.id
                for other in stay
                if other.priority_key > request_state.priority_key and not is_picked
            ]
            assert not younger, f"of {name} and {younger[0]}, the older one was preempted"
            assert request_state.preemptions <= self.max_preemptions[arrival], (
                f"{name} was preempted too often: {request_state.preemptions} times of "
                f"{self.max_preemptions[arrival]}"
            )

    def allow_preemption(self, request_state: RequestState) -> None:
        """Ignore the request's next preemption: its scheduler chose it."""
        self.max_preemptions[request_state.arrival] += 1
        self.picked_arrivals.add(request_state.arrival)

    def check_namespaces(self, state: State) -> None:
        """Check that a row's cached tokens were computed for its namespace."""
        before = -(-state.row_counters[RowCounter.NUM_COMPUTED_BEFORE] // self.limits.page_size)
        for row in state.rows_by_priority.tolist():
            request_state, start = state.requests_by_row[row], int(before[row])
            if request_state.request.prefix_namespace not in self.namespaces:
                self.namespaces.append(request_state.request.prefix_namespace)
            namespace = self.namespaces.index(request_state.request.prefix_namespace)
            for group, owners in enumerate(self.owners if self.limits.policy is not None else []):
                if group in self.limits.state_groups:
                    continue  # the row's alone; whoever runs plans reads whose tokens are in it
                first = int(state.first_pages[group, row])
                pages = state.table[group, row, first : state.spans[group, row]]
                end = max(start - first, 0)
                assert (owners[pages[:end]] == namespace).all(), (
                    f"{request_state.request.id} reads pages of another tenant"
                )
                owners[pages[end:]] = namespace


def check_beginnings(state: State, group: int, size: int) -> None:
    """Check that rows with a common prefix share its pages, as far as both are indexed and held."""
    indexed = state.row_counters[RowCounter.NUM_INDEXED]
    rows = np.flatnonzero(indexed).tolist()
    for at, row in enumerate(rows):
        for other in rows[:at]:
            states = state.requests_by_row[row], state.requests_by_row[other]
            one, two = (each.request for each in states if each is not None)
            if one.prefix_namespace != two.prefix_namespace:
                continue
            count = int(min(indexed[row], indexed[other]))
            unlike = np.flatnonzero(
                state.tokens[row, : count * size] != state.tokens[other, : count * size]
            )
            pages = int(unlike[0]) // size if len(unlike) else count
            first = int(state.first_pages[group, [row, other]].max())
            own, others = (state.table[group, at, first:pages] for at in (row, other))
            same = own == others
            assert same.all(), f"{one.id} and {two.id} have a common prefix on separate pages"
