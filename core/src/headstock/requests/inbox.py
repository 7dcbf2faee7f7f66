"""From the engine's thread to the tasks of an event loop: few wake-ups, and many tokens a piece
where tasks are slower than the engine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, MutableMapping
from operator import itemgetter

from attrs import evolve

from headstock.outputs import Update

TimedUpdate = tuple[Update, float]
"""An update, and when the engine's thread passed it on, in seconds of `time.monotonic`."""


class UpdateQueue:
    """The updates of a stream, for one task of its event loop."""

    def __init__(self) -> None:
        self.updates: list[TimedUpdate] = []
        self.waiter: asyncio.Future[None] | None = None

    def put(self, update: TimedUpdate) -> None:
        """Put an update, within the event loop, and wake the task if it waits."""
        self.updates.append(update)
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():  # the task may have been cancelled
            waiter.set_result(None)

    async def take(self) -> list[TimedUpdate]:
        """All that has come, at least one; waits for it."""
        while not self.updates:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        updates, self.updates = self.updates, []
        return updates


class Inbox:
    """Updates from the engine's thread for the tasks of an event loop, many a wake-up.

    A wake-up is a write to a pipe, during which a thread lets the interpreter go. With one for each
    update, the engine's thread would wait for the tasks as often as a step has tokens.
    """

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self.event_loop = event_loop
        self.updates: deque[tuple[UpdateQueue, TimedUpdate]] = deque()
        self.is_waking = False

    def put(self, queue: UpdateQueue, update: TimedUpdate) -> None:
        """Put the update into the queue soon, unless the event loop is closed; from any thread."""
        self.updates.append((queue, update))
        if self.is_waking:
            return
        self.is_waking = True
        try:
            self.event_loop.call_soon_threadsafe(self._hand_out)
        except RuntimeError:
            self.updates.clear()
            self.is_waking = False

    def _hand_out(self) -> None:
        """Put what has come into the queues."""
        # First, so that a thread that finds it True has put its update before what follows here.
        self.is_waking = False
        while self.updates:
            queue, update = self.updates.popleft()
            queue.put(update)


Inboxes = MutableMapping[asyncio.AbstractEventLoop, Inbox]


def join_updates(updates: Iterable[TimedUpdate]) -> list[TimedUpdate]:
    """The updates with one for each request, at the time of its last, in the order of their times.

    The update with a request's first token stays alone, for its time, and so does an error, which
    a caller that has the tokens before it must not miss.
    """
    by_request: dict[str, list[TimedUpdate]] = {}
    for each in updates:
        by_request.setdefault(each[0].id, []).append(each)
    joined: list[TimedUpdate] = []
    for group in by_request.values():
        if group[0][0].cached_tokens is not None:  # it comes with the first token
            joined.append(group.pop(0))
        errors = [group.pop()] if group and group[-1][0].finish_reason == "error" else []
        if group:
            joined.append(group[0] if len(group) == 1 else _join(group))
        joined += errors
    if len(by_request) > 1:
        joined.sort(key=itemgetter(1))
    return joined


def _join(group: list[TimedUpdate]) -> TimedUpdate:
    """The updates of one request as one."""
    last, seconds = group[-1]
    tokens = tuple([token for update, _ in group for token in update.tokens])
    entries = [entry for update, _ in group for entry in update.logprobs or ()]
    logprobs = tuple(entries) if entries else None
    if last.finish_reason is None:  # then these are all that it has
        return Update(id=last.id, tokens=tokens, logprobs=logprobs), seconds
    return evolve(last, tokens=tokens, logprobs=logprobs), seconds
