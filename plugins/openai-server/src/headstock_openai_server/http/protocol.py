"""HTTP connections with limits that uvicorn lacks: on headers, and on how slowly a client sends or
reads.
"""

from __future__ import annotations

import asyncio
from asyncio.events import TimerHandle
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headstock_openai_server.api.errors import ApiError
from headstock_openai_server.http.event_stream import ABORT, CHUNKS
from headstock_openai_server.settings import ServerSettings

LEAST_READ = 16 << 10
"""Bytes that a client must read within `--unread-timeout` if more are waiting."""
UPGRADE_HEADERS = (b"upgrade", b"http2-settings")

REASONS = {400: b"Bad Request", 431: b"Request Header Fields Too Large"}


class ChunkWriter:
    """Writes chunks of one response directly to the connection, bypassing the ASGI layers."""

    # Each layer is a coroutine: together they cost more than making the chunk.

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self.cycle = cycle

    @property
    def is_ready(self) -> bool:
        """Whether the response's body has begun and the client keeps up."""
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
    """A connection that limits the size and time of headers, and requires clients to keep sending
    bodies and reading responses.
    """

    def __init__(self, *arguments: Any, settings: ServerSettings, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.settings = settings
        self.timer: TimerHandle | None = None
        self.reader_timer: TimerHandle | None = None
        self.header_bytes = 0
        self.bytes_since_body = 0
        self.num_unread = 0
        self.has_headers = False
        self.is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give the client time for the headers of its first request."""
        super().connection_made(transport)
        self._begin_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        self._set_timer(None)
        self._stop_watching_reader()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count the bytes outside bodies: headers, complete or not, and data between chunks."""
        if self.has_headers:
            self.bytes_since_body += len(data)
        else:
            self.header_bytes += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        # The parser buffers an unfinished header without a limit.
        most = self.settings.max_header_bytes
        if (self.bytes_since_body if self.has_headers else self.header_bytes) > most:
            self._refuse_headers(f"the headers have more than {most} bytes")

    def _parse(self, data: bytes) -> None:
        """Call the handlers of what the parser finds in the data."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._parse_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("")

    def _parse_without_upgrade(self, rest: bytes) -> None:
        """Restart the request without its protocol upgrade; `rest` follows its headers.

        Java's client requests one by default. The parser would leave the body to the other
        protocol.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            self.send_400_response("")
            return
        self.parser = httptools.HttpRequestParser(self)
        lines = [b"%b %b HTTP/1.1" % (method, self.url)]
        lines += [
            b"%b: %b" % (name, value) for name, value in self.headers if name not in UPGRADE_HEADERS
        ]
        self._parse(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def on_message_begin(self) -> None:
        """Begin a request, the first of the connection or a later one."""
        super().on_message_begin()
        self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]
        if self.has_headers:
            self._begin_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Handle a header; trailers after a body are ignored."""
        if not self.has_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Refuse headers beyond the limits, and wait for the body."""
        if self.parser.should_upgrade():
            return
        self.has_headers, self.bytes_since_body = True, 0
        size = sum(len(name) + len(value) + 4 for name, value in self.headers) + len(self.url)
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if len(self.headers) > self.settings.max_headers:
            self._refuse_headers(
                f"there are {len(self.headers)} headers; at most {self.settings.max_headers} are "
                "taken"
            )
        elif size > self.settings.max_header_bytes:
            self._refuse_headers(
                f"the headers have more than {self.settings.max_header_bytes} bytes"
            )
        # RFC 9112, section 3.2
        elif num_hosts > 1 or (not num_hosts and self.parser.get_http_version() == "1.1"):
            self._refuse(ApiError(400, f"the request has {num_hosts} Host headers; send one"))
        if self.is_refused:
            return
        self._set_timer(self.settings.body_timeout)
        super().on_headers_complete()
        # The application runs later, as a task.
        self.scope[CHUNKS] = ChunkWriter(self.cycle)  # type: ignore[literal-required]

    def on_body(self, body: bytes) -> None:
        """Give the client time for the next bytes."""
        self.bytes_since_body = 0
        if not self.is_refused:
            self._set_timer(self.settings.body_timeout)
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        self.bytes_since_body = 0
        if not self.is_refused and not self.parser.should_upgrade():
            self._set_timer(None)
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Watch whether the client reads the rest of the response."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._watch_reader()

    def pause_writing(self) -> None:
        """Watch whether the client reads the backlog."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """The client has read most of it."""
        super().resume_writing()
        self._stop_watching_reader()

    def _watch_reader(self) -> None:
        """Check later how much the client has read."""
        self._stop_watching_reader()
        self.num_unread = self.transport.get_write_buffer_size()
        self.reader_timer = self.loop.call_later(self.settings.unread_timeout, self._check_reader)

    def _check_reader(self) -> None:
        """Drop the client if it has read too little."""
        left = self.transport.get_write_buffer_size()
        if left and left > self.num_unread - LEAST_READ:
            self.transport.abort()  # closing would wait for it
        elif left:
            self._watch_reader()

    def _stop_watching_reader(self) -> None:
        if self.reader_timer is not None:
            self.reader_timer.cancel()
            self.reader_timer = None

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not HTTP, in the common error format."""
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
        """Abort the connection in `seconds`, replacing an earlier timeout."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = (
            None if seconds is None else self.loop.call_later(seconds, self.transport.abort)
        )

    def _refuse_headers(self, text: str) -> None:
        self._refuse(ApiError(431, f"{text}; send less", code="headers_too_large"))

    def _refuse(self, error: ApiError) -> None:
        """Answer without the application, and close."""
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.abort()  # an error would become part of that response
            return
        self.is_refused = True
        self._set_timer(None)
        body = error.body
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%s" % (error.status, REASONS[error.status], len(body), body)
        )
        self.transport.close()
