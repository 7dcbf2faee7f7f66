"""Streams of server-sent events and waits for whole answers, which end when the client leaves."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from attrs import frozen
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from headstock.logs import log_event
from headstock_openai_server.api.errors import ApiError, translate_error
from headstock_openai_server.engine.generation import ClientGoneError, Generation, Piece

LOG = logging.getLogger("headstock.serve")

HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
ABORT = "headstock.abort"
"""The key of a scope's function that drops the connection."""
CHUNKS = "headstock.chunks"
"""The key of a scope's direct writer of chunks."""

Result = TypeVar("Result")


class Chunks(Protocol):
    """Writes chunks of a response at once."""

    @property
    def is_ready(self) -> bool:
        """Whether chunks can be written now."""

    def write(self, chunk: bytes) -> None:
        """Write a chunk that is not empty."""


@frozen
class Framing:
    """How the events of a stream are told from each other.

    ping: an addition without content, sent in long silences so that no proxy considers the stream
        dead; empty where there is none
    """

    content_type: bytes
    ping: bytes


SERVER_SENT = Framing(b"text/event-stream; charset=utf-8", b": ping\n\n")
"""Each event has a line `data: JSON` and ends with an empty line."""


class StreamFormat(Protocol):
    """Writes the events of a stream."""

    def open_stream(self) -> bytes:
        """The events before the first token."""

    def write_pieces(self, pieces: list[Piece]) -> bytes:
        """The events of new output; may be empty."""

    def close_stream(self) -> bytes:
        """The events after the last token."""

    def write_error(self, error: ApiError) -> bytes:
        """The events after an error."""


class EventStream:
    """The response that streams a generation; it closes the generation."""

    def __init__(
        self,
        generation: Generation,
        stream_format: StreamFormat,
        framing: Framing = SERVER_SENT,
    ) -> None:
        self.generation = generation
        self.format = stream_format
        self.framing = framing
        self.chunks: Chunks | None = None

    @property
    def is_ready(self) -> bool:
        """Whether a piece can be written at once."""
        return self.chunks is not None and self.chunks.is_ready

    def write_piece(self, piece: Piece) -> None:
        """Write a piece at once, without waking the stream's task."""
        events = self.format.write_pieces([piece])
        if events and self.chunks is not None:
            self.chunks.write(events)
            self.generation.last_sent = self.generation.last_news

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; an error ends it."""
        generation = self.generation
        generation.abort_connection = scope.get(ABORT, generation.abort_connection)
        watcher = asyncio.create_task(stop_with_client(receive, generation))
        try:
            headers = [(b"content-type", self.framing.content_type), *HEADERS]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send(send, self.format.open_stream())
            self.chunks = scope.get(CHUNKS)
            generation.direct = self
            while not generation.is_finished:
                pieces = await generation.next_pieces()
                if pieces or not generation.is_finished:
                    events = self.format.write_pieces(pieces) if pieces else self.framing.ping
                    await self._send(send, events)
            await send({"type": "http.response.body", "body": self.format.close_stream()})
        except ClientGoneError:
            pass
        except Exception as error:
            api_error = translate_error(error)
            if not isinstance(error, ApiError) and api_error.status == 500:
                LOG.error(log_event("a stream failed"), exc_info=error)
            await send({"type": "http.response.body", "body": self.format.write_error(api_error)})
        finally:
            watcher.cancel()
            generation.close()

    async def _send(self, send: Send, events: bytes) -> None:
        """Send a chunk; it waits while the client is far behind."""
        if not events:
            return
        generation = self.generation
        generation.send_began = generation.last_sent = time.monotonic()
        await send({"type": "http.response.body", "body": events, "more_body": True})
        generation.send_began = None


async def stop_with_client(receive: Receive, generation: Generation) -> None:
    """Stop the generation when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.stop(ClientGoneError())


async def run_for_client(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`, and cancel it when the client disconnects.

    raises: errors of `work`, ClientGoneError
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait([task, watcher], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
