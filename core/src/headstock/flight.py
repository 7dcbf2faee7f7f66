"""Jobs in the air: handed to the engine in order as room appears, and their news handed back."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from attrs import evolve, frozen

from headstock.errors import CapacityError, RequestError
from headstock.job import Job
from headstock.outputs import RequestOutput
from headstock.schedule.request import Request

if TYPE_CHECKING:
    from headstock.engine.update import Update


class EngineLoop(Protocol):
    """Steps an engine on a thread of its own; a sink hears of one request, on that thread, until its finish reason."""

    def submit(self, request: Request, sink: Callable[[Update], None]) -> None:
        """Queue `request`.   raises: RequestError"""

    def check_alive(self) -> None:
        """Raise EngineDied when the engine cannot go on."""

    def abort(self, name: str, /) -> None:
        """End the request of that id; nothing happens when there is none."""


MOST_NEWS = 2048
"""Pieces of news that wait for each other at most."""


@frozen
class News:
    """An update and when the engine's thread learned of it, in seconds."""

    update: Update
    at: float


class Mailbox:
    """News from the engine's thread, handed over in batches: a batch ends with the end of a request.

    Whoever takes each piece as it comes wakes up for every token of every request, and takes turns with the engine's
    thread at the interpreter: at 256 rows on an H200 that took a tenth of the speed. When `eager`, it is so all the
    same: a stop string must be seen at once, and a stream is to flow.
    """

    def __init__(self, *, eager: bool) -> None:
        self.eager = eager
        self.lock = threading.Lock()
        self.pending: list[News] = []
        self.batches: SimpleQueue[list[News]] = SimpleQueue()

    def put(self, news: News) -> None:
        """Add a piece of news; any thread may."""
        with self.lock:
            self.pending.append(news)
            if self.eager or news.update.finish_reason is not None or len(self.pending) >= MOST_NEWS:
                self.batches.put(self.pending)
                self.pending = []

    def get(self) -> list[News]:
        """The next batch, what is new of each request in one piece; waits for it."""
        batch = self.batches.get()
        return batch if len(batch) == 1 else merged(batch)


def merged(batch: list[News]) -> list[News]:
    """The news with what follows another piece of the same request added to that, except to a request's first piece,
    whose time is the time of its first token.
    """
    found: dict[str, list[News]] = {}
    for news in batch:
        found.setdefault(news.update.id, []).append(news)
    pieces = []
    for several in found.values():
        first = several[0]
        is_first = first.update.cached_tokens is not None or first.update.prompt_logprobs is not None
        if is_first and len(several) > 1:
            pieces.append(first)
            several = several[1:]
        pieces.append(several[0] if len(several) == 1 else added(several))
    return pieces


def added(several: list[News]) -> News:
    """Pieces of news of one request as one."""
    updates = [news.update for news in several]
    scored = [update.logprobs for update in updates if update.logprobs is not None]
    tokens = tuple(token for update in updates for token in update.tokens)
    logprobs = tuple(entry for entries in scored for entry in entries) if scored else None
    return News(evolve(updates[-1], tokens=tokens, logprobs=logprobs), several[-1].at)


class Flight:
    """Jobs given to `loop` by priority and then in order, at most `room` requests at once.

    `tell` gets every News on the loop's thread.
    """

    def __init__(self, loop: EngineLoop, jobs: Iterable[Job], room: int, tell: Callable[[News], None]) -> None:
        self.loop = loop
        self.room = room
        self.tell = tell
        pairs = [(job, request) for job in jobs for request in job.requests]
        self.waiting = deque(sorted(pairs, key=lambda pair: -pair[1].priority))
        self.live: dict[str, Job] = {}

    @property
    def busy(self) -> bool:
        """Whether news is still to come."""
        return bool(self.waiting or self.live)

    def fill(self) -> None:
        """Hand over as many requests as there is room for; one that the engine refuses ends with an error."""
        while self.waiting and len(self.live) < self.room:
            job, request = self.waiting[0]
            job.begin(request, time.monotonic())
            try:
                self.loop.submit(request, self.hear)
            except RequestError as error:
                if isinstance(error, CapacityError) and self.live:
                    return  # others must end first
                self.hear(refused(request, error))
            self.waiting.popleft()
            self.live[request.id] = job

    def hear(self, update: Update) -> None:
        """Pass on what the engine's thread says."""
        self.tell(News(update, time.monotonic()))

    def take(self, news: News) -> tuple[Job, RequestOutput] | None:
        """The job that `news` is of and what it adds; None for late news of a request that has ended.

        raises: EngineDied
        """
        if news.update.finish_reason == "error":
            self.loop.check_alive()
        name = news.update.id
        job = self.live.get(name)
        if job is None:
            return None
        output = job.absorb(news.update, news.at)
        if job.answers[name].ended:
            del self.live[name]
            if news.update.finish_reason is None:  # a stop string, of which the engine knows nothing
                self.loop.abort(name)
        return job, output

    def close(self) -> None:
        """Abort what has not ended."""
        self.waiting.clear()
        for name in self.live:
            self.loop.abort(name)
        self.live.clear()


def refused(request: Request, error: RequestError) -> Update:
    """The news that `request` ended with `error`."""
    from headstock.engine.update import Update

    return Update(id=request.id, finish_reason="error", error=str(error))


def fly(
    loop: EngineLoop, jobs: Sequence[Job], room: int, *, eager: bool = True
) -> Generator[tuple[Job, RequestOutput], None, None]:
    """Each piece of output of `jobs`, as it comes; abandoning the iterator aborts them.

    When not `eager`, pieces come when some request ends, each with all that is new of its own.
    """
    mailbox = Mailbox(eager=eager or any(job.params.stop for job in jobs))
    flight = Flight(loop, jobs, room, mailbox.put)
    try:
        while flight.busy:
            flight.fill()
            for news in mailbox.get():
                piece = flight.take(news)
                if piece is not None:
                    yield piece
    finally:
        flight.close()


async def fly_async(
    loop: EngineLoop, jobs: Iterable[Job], room: int
) -> AsyncGenerator[tuple[Job, RequestOutput], None]:
    """As `fly`, for asyncio."""
    queue: asyncio.Queue[News] = asyncio.Queue()
    running = asyncio.get_running_loop()

    def tell(news: News) -> None:
        """Wake the event loop, if it is still there to be woken."""
        with contextlib.suppress(RuntimeError):
            running.call_soon_threadsafe(queue.put_nowait, news)

    flight = Flight(loop, jobs, room, tell)
    try:
        while flight.busy:
            flight.fill()
            piece = flight.take(await queue.get())
            if piece is not None:
                yield piece
    finally:
        flight.close()
