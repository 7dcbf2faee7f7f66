"""Jobs in the air: handed to the engine in order as room appears, and their news handed back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol

from attrs import frozen

from headstock.errors import CapacityError, RequestError
from headstock.outputs import RequestOutput
from headstock.requests.prompt_request import Job
from headstock.scheduler.request import Request

if TYPE_CHECKING:
    from headstock.outputs import Update


class EngineLoop(Protocol):
    """Steps an engine on a thread of its own; a sink hears of one request, on that thread, until
    its finish reason.

    `over`: it has ended, and no sink hears anything any more.
    """

    over: bool

    def submit(
        self, request: Request, sink: Callable[[Update], None], *, stream_tokens: bool = True
    ) -> None:
        """Queue `request`. Without `stream_tokens`, its sink hears of the first token, and of
        the others at the end.

        raises: RequestError, EngineDied
        """

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


class Flight:
    """Jobs given to `loop` by priority and then in order, at most `room` requests at once.

    `tell` gets every News on the loop's thread. Without `stream_tokens`, that is a request's first
    token and then its end: whoever hears of every token takes turns with the engine's thread at the
    interpreter (256 rows on an H200 lost a tenth of their speed to it). A stop string must be seen
    at once, though.
    """

    def __init__(
        self,
        loop: EngineLoop,
        jobs: Iterable[Job],
        room: int,
        tell: Callable[[News], None],
        *,
        stream_tokens: bool,
    ) -> None:
        self.loop = loop
        self.room = room
        self.tell = tell
        self.stream_tokens = stream_tokens
        pairs = [(job, request) for job in jobs for request in job.requests]
        self.waiting = deque(sorted(pairs, key=lambda pair: -pair[1].priority))
        self.live: dict[str, Job] = {}

    @property
    def busy(self) -> bool:
        """Whether news is still to come."""
        return bool(self.waiting or self.live)

    def fill(self) -> None:
        """Hand over as many requests as there is room for; one that the engine refuses ends with an
        error.
        """
        while self.waiting and len(self.live) < self.room:
            job, request = self.waiting[0]
            job.begin(request, time.monotonic())
            self.live[request.id] = job  # before it is handed over: Ctrl-C may come right after
            try:
                self.loop.submit(
                    request, self.hear, stream_tokens=self.stream_tokens or bool(job.params.stop)
                )
            except RequestError as error:
                if isinstance(error, CapacityError) and len(self.live) > 1:
                    del self.live[request.id]
                    return  # others must end first
                self.hear(refused(request, error))
            self.waiting.popleft()

    def hear(self, update: Update) -> None:
        """Pass on what the engine's thread says."""
        self.tell(News(update, time.monotonic()))

    def take(self, news: News) -> tuple[Job, RequestOutput] | None:
        """The job that `news` is of and what it adds; None for late news of a request that has
        ended.

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
            # a stop string, of which the engine knows nothing
            if news.update.finish_reason is None:
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
    from headstock.outputs import Update

    return Update(id=request.id, finish_reason="error", error=str(error))


def first(queue: SimpleQueue[News], loop: EngineLoop) -> News:
    """What comes first in the queue; waits for it.   raises: EngineDied when nothing will come"""
    while True:
        over = loop.over  # asked before: what was told last may be in the queue by now
        # A signal that another thread got is seen between two waits.
        with contextlib.suppress(Empty):
            return queue.get(timeout=LONGEST_WAIT)
        if over:
            loop.check_alive()


def fly(
    loop: EngineLoop, jobs: Sequence[Job], room: int, *, stream_tokens: bool = True
) -> Generator[tuple[Job, RequestOutput], None, None]:
    """Each piece of output of `jobs`, as it comes; abandoning the iterator aborts them.

    When not `stream_tokens`, a request's first token is a piece, and all others are one at its end.
    """
    queue: SimpleQueue[News] = SimpleQueue()
    flight = Flight(loop, jobs, room, queue.put, stream_tokens=stream_tokens)
    try:
        while flight.busy:
            flight.fill()
            piece = flight.take(first(queue, loop))
            if piece is not None:
                yield piece
    finally:
        try:
            flight.close()
        except KeyboardInterrupt:
            flight.close()
            raise


async def fly_async(
    loop: EngineLoop, jobs: Iterable[Job], room: int, *, stream_tokens: bool = True
) -> AsyncGenerator[tuple[Job, RequestOutput], None]:
    """As `fly`, for asyncio."""
    queue: asyncio.Queue[News] = asyncio.Queue()
    running = asyncio.get_running_loop()

    def tell(news: News) -> None:
        """Wake the event loop, if it is still there to be woken."""
        with contextlib.suppress(RuntimeError):
            running.call_soon_threadsafe(queue.put_nowait, news)

    flight = Flight(loop, jobs, room, tell, stream_tokens=stream_tokens)
    try:
        while flight.busy:
            flight.fill()
            piece = flight.take(await queue.get())
            if piece is not None:
                yield piece
    finally:
        flight.close()
