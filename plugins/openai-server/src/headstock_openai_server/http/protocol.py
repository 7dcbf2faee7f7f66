"""HTTP connections with limits that uvicorn lacks: on headers, and on how slowly a client sends."""

from __future__ import annotations

import asyncio
from asyncio.events import TimerHandle
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headstock_openai_server.api.errors import ApiError
from headstock_openai_server.http.event_stream import ABORT, CHUNKS
from headstock_openai_server.settings import ServerSettings

REASONS = {400: b"Bad Request", 431: b"Request Header Fields Too Large"}


class ChunkWriter:
    """Writes chunks of one response, past the layers between its application and its connection."""

    # Each layer is a coroutine: together they cost more than to make the chunk.

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self.cycle = cycle

    @property
    def is_ready(self) -> bool:
        """Whether the response is in its body, and its client reads as fast as it gets."""
        cycle = self.cycle
        return (
            cycle.chunked_encoding is True
            and not cycle.response_complete
            and not cycle.disconnected
            and not cycle.flow.write_paused
        )

    def write(self, chunk: bytes) -> None:
        """Write a chunk that is not empty."""
        self.cycle.transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))


class GuardedProtocol(HttpToolsProtocol):
    """A connection whose headers must come whole, in time and within bounds, and whose bodies must
    keep coming.
    """

    def __init__(self, *arguments: Any, settings: ServerSettings, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.settings = settings
        self.timer: TimerHandle | None = None
        self.header_bytes = 0
        self.has_headers = False
        self.is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give the client time for the headers of its first request."""
        super().connection_made(transport)
        self._begin_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer."""
        self._set_timer(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count the bytes of headers, whole or not."""
        if not self.has_headers:
            self.header_bytes += len(data)
        super().data_received(data)
        # The parser keeps a header that has not ended, however long it gets.
        if not self.has_headers and self.header_bytes > self.settings.max_header_bytes:
            self._refuse_headers(
                f"the headers have more than {self.settings.max_header_bytes} bytes"
            )

    def on_message_begin(self) -> None:
        """Begin a request, the first of the connection or a later one."""
        super().on_message_begin()
        self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]
        if self.has_headers:
            self._begin_headers()

    def on_headers_complete(self) -> None:
        """Refuse headers beyond the limits, and wait for the body."""
        self.has_headers = True
        size = sum(len(name) + len(value) + 4 for name, value in self.headers) + len(self.url)
        if len(self.headers) > self.settings.max_headers:
            self._refuse_headers(
                f"there are {len(self.headers)} headers; at most {self.settings.max_headers} are "
                "taken"
            )
        elif size > self.settings.max_header_bytes:
            self._refuse_headers(
                f"the headers have more than {self.settings.max_header_bytes} bytes"
            )
        if self.is_refused:
            return
        self._set_timer(self.settings.body_timeout)
        super().on_headers_complete()
        # The application runs later, as a task.
        self.scope[CHUNKS] = ChunkWriter(self.cycle)  # type: ignore[literal-required]

    def on_body(self, body: bytes) -> None:
        """Give the client time for the next bytes."""
        if not self.is_refused:
            self._set_timer(self.settings.body_timeout)
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        if not self.is_refused:
            self._set_timer(None)
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in the form of all errors."""
        if not self.is_refused:
            self._refuse(ApiError(400, "this is not a valid HTTP request"))

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, unless a next request has begun."""
        if self.has_headers:
            super().timeout_keep_alive_handler()

    def _begin_headers(self) -> None:
        self.header_bytes, self.has_headers = 0, False
        self._set_timer(self.settings.header_timeout)

    def _set_timer(self, seconds: float | None) -> None:
        """Abort the connection in `seconds`, in place of what was set before."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = (
            None if seconds is None else self.loop.call_later(seconds, self.transport.abort)
        )

    def _refuse_headers(self, text: str) -> None:
        self._refuse(ApiError(431, f"{text}; send less", code="headers_too_large"))

    def _refuse(self, error: ApiError) -> None:
        """Answer without the application, and close."""
        self.is_refused = True
        self._set_timer(None)
        body = error.body
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%s" % (error.status, REASONS[error.status], len(body), body)
        )
        self.transport.close()
