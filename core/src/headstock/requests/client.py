"""Hands prompt requests to the engine as room appears, and turns its updates into outputs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from headstock.errors import CapacityError, RequestError
from headstock.outputs import Update
from headstock.requests.embedding_request import EmbeddingRequest
from headstock.requests.engine_protocol import EngineLoop
from headstock.requests.inbox import Inbox, Inboxes, TimedUpdate, UpdateQueue, join_updates
from headstock.requests.process_life import check_process
from headstock.requests.prompt_request import PromptRequest
from headstock.scheduler.request import Request

POLL_SECONDS = 0.2

PromptKind = TypeVar("PromptKind", PromptRequest, EmbeddingRequest)


class RequestClient(Generic[PromptKind]):
    """Submits `prompt_requests` to `loop` by priority and then in order.

    At most `max_in_flight` requests are submitted and have not ended. `deliver` gets every update,
    on the loop's thread. Without `stream_tokens` these are a request's first token and then its
    end, except for requests with stop strings, which must be seen at once.
    """

    # Tokens are streamed only on request: a caller that wakes up for every token competes with the
    # engine thread for the GIL. That cost 256 rows on an H200 a tenth of their speed.

    def __init__(
        self,
        loop: EngineLoop,
        prompt_requests: Iterable[PromptKind],
        max_in_flight: int,
        deliver: Callable[[TimedUpdate], None],
        *,
        stream_tokens: bool,
    ) -> None:
        self.loop = loop
        self.max_in_flight = max_in_flight
        self.deliver = deliver
        self.stream_tokens = stream_tokens
        pairs = [
            (prompt_request, request)
            for prompt_request in prompt_requests
            for request in prompt_request.requests
        ]
        # The sort is stable, so that requests of equal priority stay in the caller's order.
        self.waiting: deque[tuple[PromptKind, Request]] = deque(
            sorted(pairs, key=lambda pair: -pair[1].priority)
        )
        self.in_flight: dict[str, PromptKind] = {}

    @property
    def has_unfinished(self) -> bool:
        """Whether a request has not ended, so that an update is still to come."""
        return bool(self.waiting or self.in_flight)

    def submit_waiting(self) -> None:
        """Submit as many requests as there is room for; a refused one ends with an error."""
        # Requests are handed over lazily: the engine's queue stays short, so that closing an
        # iterator over a million prompts aborts a few of them, and no arrival time is that of a
        # request which could not have run anyway.
        while self.waiting and len(self.in_flight) < self.max_in_flight:
            prompt_request, request = self.waiting[0]
            prompt_request.mark_submitted(request, time.monotonic())
            # Noted before it is submitted: Ctrl-C may come right after, and `close` must abort it.
            self.in_flight[request.id] = prompt_request
            try:
                self.loop.submit(
                    request,
                    self.on_update,
                    stream_tokens=self.stream_tokens or prompt_request.must_stream,
                )
            except RequestError as error:
                # The pool is under pressure (`on_pressure="reject"`): wait until one of ours ends.
                if isinstance(error, CapacityError) and len(self.in_flight) > 1:
                    del self.in_flight[request.id]
                    return
                # Through the queue like any update: output leaves in one place alone.
                self.on_update(Update(id=request.id, finish_reason="error", error=str(error)))
            self.waiting.popleft()

    def on_update(self, update: Update) -> None:
        """Deliver `update` with the present time; the sink of every request."""
        self.deliver((update, time.monotonic()))

    def apply_update(self, update: Update, seconds: float) -> tuple[PromptKind, Any] | None:
        """The prompt request of `update`, which came at `seconds`, and what it adds.

        The result is None for a late update of a request that has ended.
        raises: EngineDied
        """
        if update.finish_reason == "error":
            # An engine that died ends each request with an error: then raise what killed it.
            self.loop.check_alive()
        prompt_request = self.in_flight.get(update.id)
        if prompt_request is None:
            return None
        output = prompt_request.apply_update(update, seconds)
        if prompt_request.has_ended(update.id):
            del self.in_flight[update.id]
            # A stop string ended it, which the engine knows nothing of: it would run on.
            if update.finish_reason is None:
                self.loop.abort(update.id)
        return prompt_request, output

    def close(self) -> None:
        """Abort the requests that have not ended."""
        self.waiting.clear()
        for request_id in self.in_flight:
            self.loop.abort(request_id)
        self.in_flight.clear()


def _wait_for_update(
    queue: SimpleQueue[TimedUpdate], loop: EngineLoop, process_id: int
) -> TimedUpdate:
    """The first update in the queue; waits for it.

    raises: EngineDied when none will come, UsageError in another process than `process_id`
    """
    while True:
        # Read before the queue: the loop passes its last updates on before it is over.
        is_over = loop.has_ended
        # A wait without a timeout would not be interrupted by a signal that another thread got.
        with contextlib.suppress(Empty):
            return queue.get(timeout=POLL_SECONDS)
        check_process(process_id)
        if is_over:
            loop.check_alive()


def stream_outputs(
    loop: EngineLoop,
    prompt_requests: Sequence[PromptKind],
    max_in_flight: int,
    *,
    stream_tokens: bool = True,
) -> Generator[tuple[PromptKind, Any], None, None]:
    """Each piece of output with its prompt request, as it comes.

    Closing the generator aborts what has not ended. Without `stream_tokens`, a request's first
    token is a piece, and all others are one at its end.
    raises: EngineDied
    """
    queue: SimpleQueue[TimedUpdate] = SimpleQueue()
    process_id = os.getpid()
    client = RequestClient(
        loop, prompt_requests, max_in_flight, queue.put, stream_tokens=stream_tokens
    )
    try:
        while client.has_unfinished:
            client.submit_waiting()
            piece = client.apply_update(*_wait_for_update(queue, loop, process_id))
            if piece is not None:
                yield piece
    finally:
        try:
            client.close()
        except KeyboardInterrupt:
            # A second Ctrl-C broke `close` off; requests left behind would keep the engine busy.
            client.close()
            raise


async def stream_outputs_async(
    loop: EngineLoop,
    prompt_requests: Sequence[PromptKind],
    max_in_flight: int,
    inboxes: Inboxes,
    *,
    stream_tokens: bool = True,
) -> AsyncGenerator[tuple[PromptKind, Any], None]:
    """As `stream_outputs`, for asyncio; streams of one event loop share its inbox.

    Tokens of a completion that come while the task is busy are one piece, unless the text may end
    it: with stop strings, or where at most one call is allowed.
    """
    queue, event_loop = UpdateQueue(), asyncio.get_running_loop()
    inbox = inboxes.get(event_loop)
    if inbox is None:
        inbox = inboxes[event_loop] = Inbox(event_loop)
    # Where the text may end an answer, what comes behind its end belongs to no piece.
    may_join = not any(prompt_request.must_stream for prompt_request in prompt_requests)
    client = RequestClient(
        loop,
        prompt_requests,
        max_in_flight,
        partial(inbox.put, queue),
        stream_tokens=stream_tokens,
    )
    try:
        client.submit_waiting()
        while client.has_unfinished:
            updates = await queue.take()
            if may_join and len(updates) > 1:
                updates = join_updates(updates)
            for update in updates:
                piece = client.apply_update(*update)
                if piece is not None:
                    yield piece
                if client.waiting:
                    client.submit_waiting()
    finally:
        client.close()
