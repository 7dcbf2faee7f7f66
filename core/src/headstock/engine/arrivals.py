"""Requests and events that any thread queues, until a step takes them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from headstock.engine.output_tracker import OutputTracker
from headstock.engine.page_demand import PageDemand
from headstock.engine.tracked_request import TrackedRequest
from headstock.grammar import FollowedRequest
from headstock.scheduler import Aborted, Arrived, Event, Limits, Request, State


class Arrivals:
    """What was queued since the last step took it, in the order in which it was.

    Any thread may add and read; the engine's thread takes.

    queue: requests and events
    requests: by id, those that the output tracker does not know yet
    """

    def __init__(self, limits: Limits, *, counts_pages: bool) -> None:
        """counts_pages: whether `pressure` is kept up to date"""
        self.limits, self.counts_pages = limits, counts_pages
        self.queue: deque[TrackedRequest | Event] = deque()
        self.requests: dict[str, TrackedRequest] = {}
        self.num_requests = 0
        self.page_demand = PageDemand(limits)

    def add_request(
        self, request: Request, followed: FollowedRequest | None, *, stream_tokens: bool
    ) -> None:
        """Queue a request that is prepared, with the grammar that it follows.

        After an interrupt at any point of this method, an `Aborted` still removes the request.
        """
        pages = self.limits.pages_by_group(len(request.prompt))
        self.num_requests += 1
        tracked = TrackedRequest(
            request, stream_tokens, pages, time.monotonic(), self.num_requests, followed=followed
        )
        self.requests[request.id] = tracked
        self.queue.append(tracked)

    def add(self, event: Event) -> None:
        """Queue an event."""
        self.queue.append(event)

    @property
    def has_aborts(self) -> bool:
        """Whether the end of a request is queued."""
        return bool(self.queue) and any(isinstance(each, Aborted) for each in tuple(self.queue))

    @property
    def pressure(self) -> float:
        """The share of pages that requests hold or wait for, in the KV group where it is largest.

        Before the first `count`, or without `counts_pages`, requests that have run count for none.
        """
        # The engine's thread may count a queued request at any moment: the queue is read first.
        return self.page_demand.find_pressure(list(self.requests.values()))

    def take(self, tracker: OutputTracker) -> tuple[list[Event], list[TrackedRequest]]:
        """Take everything out of the queue; return its events and the requests that arrived.

        writes: tracker
        """
        events: list[Event] = []
        arrived: list[TrackedRequest] = []
        while self.queue:
            entry = self.queue.popleft()
            if isinstance(entry, TrackedRequest):
                tracker.add_request(entry)
                arrived.append(entry)
                entry = Arrived(entry.request)
            elif isinstance(entry, Aborted):
                # An interrupt inside `add_request` may leave an entry whose request never arrives.
                self.requests.pop(entry.id, None)
            events.append(entry)
        return events, arrived

    def count(
        self, state: State, tracker: OutputTracker, arrived: Sequence[TrackedRequest]
    ) -> None:
        """Count the pages that a step's requests wait for, and drop those that arrived in it."""
        if self.counts_pages:
            self.page_demand.count(state, tracker, arrived)
        # After the count: a reader in between counts a request once, by its number.
        for tracked in arrived:
            self.requests.pop(tracked.request.id, None)
