"""A server that streams chunks of an answer and does nothing else: what uvicorn and Starlette cost.

python bare_server.py PORT
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

CHUNK = (
    b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"demo","choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
)
INTERVAL = 0.01
"""Seconds between chunks of a stream, as the scripted engine has it."""


async def make_chunks() -> AsyncIterator[bytes]:
    """Chunks for ever."""
    while True:
        await asyncio.sleep(INTERVAL)
        yield CHUNK


async def stream(request: Request) -> StreamingResponse:
    """An answer without an end."""
    return StreamingResponse(make_chunks(), media_type="text/event-stream")


if __name__ == "__main__":
    uvicorn.run(
        Starlette(routes=[Route("/", stream)]),
        port=int(sys.argv[1]),
        http="httptools",
        log_level="critical",
    )
