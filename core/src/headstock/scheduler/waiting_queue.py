"""The queue of waiting requests, a frozen value that is cheap to change at any length."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence, Set
from functools import cached_property

import numpy as np
from attrs import frozen

from headstock.scheduler.request import RequestState

MAX_PART = 128
"""Requests of a part; a longer one is halved."""

NUM_COLUMNS = 7


class Part(tuple[RequestState, ...]):
    """Requests that follow each other in the queue."""

    # Kept with the part: a step changes one part or two, and schedulers that look at the whole
    # queue would have all columns made anew otherwise.
    @cached_property
    def columns(self) -> np.ndarray:
        """What the requests ask for, [columns, n] int64, in the order of `WaitingQueue.columns`."""
        values = [
            (
                len(entry.tokens),
                len(entry.request.prompt),
                entry.request.max_tokens,
                entry.request.priority,
                entry.user,
                entry.adapter,
                entry.arrived_at,
            )
            for entry in self
        ]
        return np.array(values, np.int64).reshape(-1, NUM_COLUMNS).T


@frozen
class WaitingQueue:
    """Waiting requests in priority order, as parts of up to `MAX_PART`.

    A change copies one part and the tuple of parts. One tuple of 4,096 requests would be copied
    whole, which takes 30 us for an arrival and 300 us for an admission.
    """

    parts: tuple[Part, ...] = ()
    length: int = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[RequestState]:
        for part in self.parts:
            yield from part

    @property
    def head(self) -> RequestState:
        """The request that goes first; there must be one."""
        return self.parts[0][0]

    @property
    def columns(self) -> np.ndarray:
        """What the requests ask for, [7, waiting] int64.

        Known tokens, prompt tokens, max_tokens, priority, the numbers of user and adapter, and when
        the request arrived.
        """
        if not self.parts:
            return np.zeros((NUM_COLUMNS, 0), np.int64)
        return np.concatenate([part.columns for part in self.parts], axis=1)

    def pick(self, positions: Sequence[int]) -> list[RequestState]:
        """Return the requests at these positions, which ascend within the queue."""
        picked: list[RequestState] = []
        start, parts = 0, iter(self.parts)
        part: tuple[RequestState, ...] = ()
        for position in positions:
            while position >= start + len(part):
                start += len(part)
                part = next(parts)
            picked.append(part[position - start])
        return picked

    def first(self, count: int) -> tuple[RequestState, ...]:
        """Return the `count` requests that go first, or all when there are fewer."""
        request_states: tuple[RequestState, ...] = ()
        for part in self.parts:
            if len(request_states) >= count:
                break
            request_states += part
        return request_states[:count]

    def put(self, request_state: RequestState) -> WaitingQueue:
        """Return the queue with the request where its priority key belongs."""
        parts, key = self.parts, request_state.priority_key
        if not parts:
            return WaitingQueue((Part((request_state,)),), 1)
        at = len(parts) - 1
        if parts[at][0].priority_key > key:  # most arrivals sort last
            at = max(bisect_right(parts, key, key=lambda part: part[0].priority_key) - 1, 0)
        part = parts[at]
        inside = (
            len(part)
            if part[-1].priority_key < key
            else bisect_left(part, key, key=lambda other: other.priority_key)
        )
        part = Part((*part[:inside], request_state, *part[inside:]))
        half = len(part) // 2
        new = (part,) if len(part) <= MAX_PART else (Part(part[:half]), Part(part[half:]))
        return WaitingQueue((*parts[:at], *new, *parts[at + 1 :]), self.length + 1)

    def without(self, arrivals: Set[int]) -> WaitingQueue:
        """Return the queue without the waiting requests with these arrival numbers.

        Only parts up to the last of them are looked through, and most leave from the front.
        """
        parts_left: list[Part] = []
        num_left = len(arrivals)
        for at, part in enumerate(self.parts):
            if not num_left:
                parts_left += self.parts[at:]
                break
            rest = Part(
                [request_state for request_state in part if request_state.arrival not in arrivals]
            )
            num_left -= len(part) - len(rest)
            if rest:
                parts_left.append(rest if len(rest) < len(part) else part)
        return WaitingQueue(tuple(parts_left), self.length - len(arrivals))
