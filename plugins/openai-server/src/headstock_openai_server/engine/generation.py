"""The engine requests of one HTTP request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from attrs import define, frozen

from headstock.logs import log_event
from headstock.outputs import CompletionOutput, Update
from headstock.requests import PromptRequest
from headstock.text import join_pieces
from headstock_openai_server.api.errors import ApiError

if TYPE_CHECKING:
    from headstock_openai_server.engine.service import Service

LOG = logging.getLogger("headstock.serve")

LONG_PROMPT = 256
"""Prompts of this many tokens have their log-probabilities encoded on another thread."""


class ClientGoneError(Exception):
    """The client has closed its connection; no response can be sent."""


@define
class Progress:
    """The progress of one choice: the times of its first and latest token, and its token count."""

    first: float
    last: float
    num_tokens: int


@frozen
class Piece:
    """The new output of one choice."""

    choice: int
    prompt_request: PromptRequest
    output: CompletionOutput


class DirectOutput(Protocol):
    """Writes pieces to a client at once."""

    @property
    def is_ready(self) -> bool:
        """Whether the client can receive a piece now."""

    def write_piece(self, piece: Piece) -> None:
        """Write a piece."""


class Generation:
    """Runs prompt requests for one client and delivers their new output.

    Choice k * n + i is answer i to prompt k. It must be closed: that ends requests that
    still run, and frees its place in the queue.

    answer_id: by which clients know a stream; empty for what is answered as a whole
    last_sent: when the client was last sent anything
    send_began: when the chunk that the client has not read yet was handed over; None without one
    counts_output: False where the client wants only the prompt, and gets no token of the answer
    abort_connection: drops the client's connection and its unread data
    direct: receives pieces immediately while the client keeps up, bypassing `next_pieces`
    """

    # Updates wait here until the client has received the previous ones, then go out together. A
    # slow client therefore costs a few bytes per token and delays no other client.

    def __init__(
        self,
        service: Service,
        prompt_requests: Sequence[PromptRequest],
        *,
        streams: bool,
        answer_id: str = "",
        counts_output: bool = True,
    ) -> None:
        self.service = service
        self.answer_id = answer_id
        self.counts_output = counts_output
        self.prompt_requests = prompt_requests
        self.streams = streams
        requests = [
            (prompt_request, request)
            for prompt_request in prompt_requests
            for request in prompt_request.requests
        ]
        self.choices = {
            request.id: (index, prompt_request)
            for index, (prompt_request, request) in enumerate(requests)
        }
        self.unstarted = {request.id: len(request.prompt) for _, request in requests}
        self.live = set(self.choices)
        self.pending: list[tuple[Update, float]] = []
        self.waiter: asyncio.Future[None] | None = None
        self.stop_error: Exception | None = None
        self.num_output_tokens = 0
        self.finish_reasons: list[str] = []
        self.arrival = self.last_news = time.monotonic()
        self.progress: dict[str, Progress] = {}
        self.send_began: float | None = None
        self.last_sent = self.arrival
        self.abort_connection: Callable[[], None] = lambda: None
        self.direct: DirectOutput | None = None

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended."""
        return not self.live

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens of all prompts."""
        return sum(len(each.prompt.tokens) for each in self.prompt_requests)

    @property
    def num_cached_tokens(self) -> int:
        """The prompt tokens that came from the prefix index."""
        return sum(each.metrics.cached_tokens or 0 for each in self.prompt_requests)

    async def submit(self) -> None:
        """Hand all requests to the engine.   raises: RequestError, EngineDied"""
        requests = []
        for prompt_request in self.prompt_requests:
            for request in prompt_request.requests:
                prompt_request.mark_submitted(request, self.arrival)
                requests.append(request)
        must_stream = self.streams or any(each.must_stream for each in self.prompt_requests)
        await self.service.loop.submit_batch(requests, self.on_update, stream_tokens=must_stream)

    def on_update(self, update: Update) -> None:
        """Keep an update for `next_pieces`; the sink of every request."""
        now = self.last_news = time.monotonic()
        if update.tokens:
            self._note_tokens(update, now)
        if self._can_write(update):
            self._write_update(update, now)
        else:
            self.pending.append((update, now))
            self._wake()

    def _can_write(self, update: Update) -> bool:
        """Whether the update is a plain one and the client has received everything before it."""
        waiter, direct = self.waiter, self.direct
        return (
            direct is not None
            # Everything before it has been received.
            and waiter is not None
            and not waiter.done()
            and update.id in self.live
            and _is_plain(update)
            and direct.is_ready
        )

    def _write_update(self, update: Update, now: float) -> None:
        """Write the update's additions, or make `next_pieces` raise the error."""
        # Waking the stream's task costs more than the piece itself.
        try:
            choice, prompt_request = self.choices[update.id]
            output = self._apply_plain(prompt_request, update, now)
            self.direct.write_piece(Piece(choice, prompt_request, output))  # type: ignore[union-attr]
        except Exception as error:
            self.stop(error)
        if self.is_finished:
            self._wake()

    def _note_tokens(self, update: Update, now: float) -> None:
        """Count tokens and times for the metrics."""
        metrics, progress = self.service.metrics, self.progress.get(update.id)
        if progress is None:
            self.service.waiting_tokens -= self.unstarted.pop(update.id, 0)
            metrics.count_start(now - self.arrival, update.queue_seconds or 0.0)
            self.progress[update.id] = Progress(now, now, len(update.tokens))
            return
        if self.streams:
            metrics.observe_token_gap(now - progress.last)
        progress.last = now
        progress.num_tokens += len(update.tokens)

    def stop(self, error: Exception) -> None:
        """Make `next_pieces` raise `error`; later errors are ignored."""
        self.stop_error = self.stop_error or error
        self._wake()

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def ping(self) -> None:
        """Make `next_pieces` return, even without new output."""
        self._wake()

    async def next_pieces(self) -> list[Piece]:
        """The new output, one piece per choice; empty after `ping`.

        raises: ApiError when a request fails, ClientGoneError, the error given to `stop`
        """
        if not self.pending and self.stop_error is None:
            self.waiter = asyncio.get_running_loop().create_future()
            try:
                await self.waiter
            finally:
                self.waiter = None
        if self.stop_error is not None:
            raise self.stop_error
        pending, self.pending = self.pending, []
        outputs: dict[str, list[CompletionOutput]] = {}
        for update, seconds in pending:
            # A stop string may have ended a choice while its last tokens were in transit.
            if update.id in self.live:
                output = await self._apply_update(update, seconds)
                outputs.setdefault(update.id, []).append(output)
        return [
            Piece(*self.choices[id], pieces[0] if len(pieces) == 1 else join_pieces(pieces))
            for id, pieces in outputs.items()
        ]

    def check_update(self, update: Update) -> None:
        """Raise ApiError if the update ends its request with an error."""
        if update.finish_reason == "error":
            raise ApiError(
                500,
                "the engine could not compute an answer to this request"
                if self.service.is_alive
                else "the engine has stopped",
            )
        if update.finish_reason == "abort":
            raise ApiError(503, "the server is ending", code="shutting_down")

    async def _apply_update(self, update: Update, seconds: float) -> CompletionOutput:
        """The update's addition to its completion.   raises: ApiError"""
        self.check_update(update)
        _, prompt_request = self.choices[update.id]
        if self.streams and _is_plain(update):
            return self._apply_plain(prompt_request, update, seconds)
        if update.prompt_logprobs is not None and len(update.prompt_logprobs) > LONG_PROMPT:
            whole = await asyncio.to_thread(prompt_request.apply_update, update, seconds)
        else:
            whole = prompt_request.apply_update(update, seconds)
        return self._count_output(update, whole.outputs[0], seconds)

    def _apply_plain(
        self, prompt_request: PromptRequest, update: Update, seconds: float
    ) -> CompletionOutput:
        """The addition of a plain update to its completion.   raises: ApiError"""
        # Only text, which is not stored: this halves the time.
        output = prompt_request.completions[update.id].apply_update(update)
        if update.cached_tokens is not None:  # the first of its request
            prompt_request.update_metrics(update, seconds)
        return self._count_output(update, output, seconds)

    def _count_output(
        self, update: Update, output: CompletionOutput, seconds: float
    ) -> CompletionOutput:
        """Return `output` of `update`, after counting its tokens and its end.

        raises: ApiError
        """
        if self.counts_output:
            self.num_output_tokens += len(output.token_ids)
        if (
            output.finish_reason == "error"
        ):  # a broken tool parser; the engine's errors are caught earlier
            LOG.error(log_event("an answer failed", reason=output.error))
            raise ApiError(500, "the tool parser failed on this answer", code="tool_parser_failed")
        if output.finish_reason is not None:
            self.finish_reasons.append(output.finish_reason)
            self._end_choice(update.id)
            # A stop string or a tool call, which the engine does not see.
            if update.finish_reason is None:
                self.service.loop.drop([update.id])
            self.service.metrics.count_end(output.finish_reason, seconds - self.arrival)
            self._count_answer(update.id, seconds)
        return output

    def _count_answer(self, request_id: str, seconds: float) -> None:
        """Count the tokens of a successful choice, and their time."""
        metrics = self.service.metrics
        progress, prompt_request = self.progress.get(request_id), self.choices[request_id][1]
        if progress is not None:
            num_tokens = progress.num_tokens if self.counts_output else 0
            metrics.count_answer(
                len(prompt_request.prompt.tokens), num_tokens, seconds - progress.first
            )
        if prompt_request.is_finished and self.counts_output:
            answers = [self.progress.get(request.id) for request in prompt_request.requests]
            metrics.count_prompt(max(each.num_tokens if each else 0 for each in answers))

    def _end_choice(self, request_id: str) -> None:
        self.live.discard(request_id)
        self.service.num_sequences -= 1
        self.service.waiting_tokens -= self.unstarted.pop(request_id, 0)

    async def collect(self) -> None:
        """Wait until every choice has ended.   raises: as `next_pieces`"""
        while not self.is_finished:
            await self.next_pieces()

    def close(self, error: BaseException | None = None) -> None:
        """End the running choices with `error`; a second call does nothing."""
        self.service.generations.discard(self)
        live = list(self.live)
        if live:
            self.service.loop.drop(live)
            # The task that waits for a whole answer is cancelled when the client disconnects.
            is_gone = isinstance(error or self.stop_error, ClientGoneError | asyncio.CancelledError)
            outcome = "abort" if is_gone else "error"
            for request_id in live:
                self._end_choice(request_id)
                self.finish_reasons.append(outcome)
                self.service.metrics.count_end(outcome, time.monotonic() - self.arrival)


def _is_plain(update: Update) -> bool:
    """Whether the update only has tokens, like most, and does not end its request."""
    return update.finish_reason is None and update.prompt_logprobs is None
