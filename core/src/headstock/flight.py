"""Jobs in the air: handed to the engine in order as room appears, and their news handed back."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol

from attrs import define, evolve, field, frozen

from headstock.errors import CapacityError, RequestError
from headstock.job import Job
from headstock.outputs import RequestOutput
from headstock.schedule.request import Request

if TYPE_CHECKING:
    from headstock.engine.update import TokenLogprob, Update


class EngineLoop(Protocol):
    """Steps an engine on a thread of its own; a sink hears of one request, on that thread, until its finish reason."""

    def submit(self, request: Request, sink: Callable[[Update], None]) -> None:
        """Queue `request`.   raises: RequestError"""

    def check_alive(self) -> None:
        """Raise EngineDied when the engine cannot go on."""

    def abort(self, name: str, /) -> None:
        """End the request of that id; nothing happens when there is none."""


LONGEST_WAIT = 0.2
"""Seconds."""


@frozen
class News:
    """An update and when the engine's thread learned of it, in seconds."""

    update: Update
    at: float


@define
class Gathered:
    """What is new of a request: its first piece as it came, and all tokens and scores since."""

    first: News | None
    tokens: list[int] = field(factory=list)
    scores: list[TokenLogprob] = field(factory=list)

    def add(self, update: Update) -> None:
        """Add to what is new."""
        self.tokens.extend(update.tokens)
        self.scores.extend(update.logprobs or ())

    def pieces(self, last: News) -> list[News]:
        """All of it in at most two pieces, the second of which ends as `last` does."""
        update = evolve(last.update, tokens=tuple(self.tokens), logprobs=tuple(self.scores) if self.scores else None)
        rest = News(update, last.at)
        return [rest] if self.first is None else [self.first, rest]


class Mailbox:
    """News from the engine's thread. When not `eager`, what is new of a request waits for the request's end.

    Whoever takes each piece as it comes wakes up for every token of every request, and takes turns with the engine's
    thread at the interpreter: at 256 rows on an H200 that took a tenth of the speed. Pieces that wait are not kept but
    added up, since the garbage collector looks at all that is kept. A stop string must be seen at once and a stream is
    to flow, though.
    """

    def __init__(self, *, eager: bool) -> None:
        self.eager = eager
        self.lock = threading.Lock()
        self.pending: dict[str, Gathered] = {}
        self.batches: SimpleQueue[list[News]] = SimpleQueue()

    def put(self, news: News) -> None:
        """Add a piece of news; any thread may."""
        if self.eager:
            self.batches.put([news])
            return
        update = news.update
        with self.lock:
            held = self.pending.get(update.id)
            if held is None:
                # Its time is that of the first token, so the first piece stays apart.
                told = update.cached_tokens is not None or update.prompt_logprobs is not None
                held = self.pending[update.id] = Gathered(news if told and update.finish_reason is None else None)
            if held.first is not news:
                held.add(update)
            if update.finish_reason is not None:
                self.batches.put(self.pending.pop(update.id).pieces(news))

    def get(self) -> list[News]:
        """What is new of some request, in at most two pieces; waits for it."""
        while True:
            # A signal that another thread got is seen between two waits.
            with contextlib.suppress(Empty):
                return self.batches.get(timeout=LONGEST_WAIT)


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

    When not `eager`, the pieces of a request come when it ends.
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
