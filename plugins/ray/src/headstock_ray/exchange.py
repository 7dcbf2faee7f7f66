"""One HTTP request, as it goes from an ingress to a replica and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from attrs import frozen
from starlette.types import ASGIApp, Message

Headers = list[tuple[bytes, bytes]]

CHUNK_SECONDS = 0.02
"""How long a replica collects output before it sends more: each chunk costs Ray near a ms."""


@frozen
class HttpRequest:
    """A request with its whole body."""

    method: str
    path: str
    query: bytes
    headers: Headers
    client: tuple[str, int] | None
    body: bytes


@frozen
class HttpHead:
    """The beginning of an answer."""

    status: int
    headers: Headers


class AppExchange:
    """Has an application answer a request, and collects what it sends."""

    def __init__(self, app: ASGIApp, request: HttpRequest) -> None:
        self.request = request
        self.head: HttpHead | None = None
        self.body = bytearray()
        self.news = asyncio.Event()
        self.gone = asyncio.Event()
        self.is_read = False
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "scheme": "http",
            "method": request.method,
            "path": request.path,
            "raw_path": request.path.encode(),
            "root_path": "",
            "query_string": request.query,
            "headers": request.headers,
            "client": request.client,
            "server": None,
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))
        self.task.add_done_callback(lambda _: self.news.set())

    async def read(self) -> AsyncIterator[HttpHead | bytes]:
        """The head of the answer, and its body in pieces; the answer ends with the iterator."""
        try:
            is_open = False
            while True:
                await self.news.wait()
                self.news.clear()
                is_done = self.task.done()
                if self.head is not None and not is_open:
                    is_open = True
                    yield self.head
                if self.body:
                    piece, self.body = bytes(self.body), bytearray()
                    yield piece
                if is_done:
                    return
                if is_open:
                    await asyncio.sleep(CHUNK_SECONDS)
        finally:
            self.gone.set()
            await asyncio.wait([self.task])

    async def _receive(self) -> Message:
        """The body, then the client's end."""
        if not self.is_read:
            self.is_read = True
            return {"type": "http.request", "body": self.request.body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        """Keep what the application sends."""
        if message["type"] == "http.response.start":
            self.head = HttpHead(message["status"], list(message["headers"]))
        else:
            self.body += message.get("body", b"")
        self.news.set()
