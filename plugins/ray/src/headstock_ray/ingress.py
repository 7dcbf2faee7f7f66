"""What takes HTTP requests from Ray Serve, and hands each to the replica of its conversation."""

from __future__ import annotations

import logging
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from starlette.types import Receive, Scope, Send

from headstock.logs import log_event
from headstock_openai_server.api.errors import ApiError, busy, not_found, unavailable
from headstock_ray.affinity import find_session
from headstock_ray.event_tail import EventTail
from headstock_ray.exchange import HttpHead, HttpRequest

LOG = logging.getLogger("headstock.ray")

OWN_PATHS = ("/", "/live", "/metrics")
"""What each server has for itself: which replica answered would be chance."""


class RoutedApp:
    """An application that has replicas answer.

    replicas: the handle of their deployment
    max_body_bytes: of a request
    """

    def __init__(self, replicas: Any, max_body_bytes: int) -> None:
        self.replicas = replicas
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await _follow_lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        try:
            request = await self._read_request(scope, receive)
        except ApiError as error:
            await _send_error(send, error)
            return
        except ConnectionError:
            return
        await self._pass_on(request, send)

    async def _read_request(self, scope: Scope, receive: Receive) -> HttpRequest:
        """The whole request.   raises: ApiError, ConnectionError when the client has gone"""
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        if path in OWN_PATHS:
            raise not_found(f"{path} is not served through Ray Serve, which has metrics itself")
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError("the client has gone")
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self.max_body_bytes:
                raise ApiError(
                    413,
                    f"the body has more than {self.max_body_bytes} bytes; send less",
                    code="body_too_large",
                )
        headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
        client = scope.get("client")
        return HttpRequest(
            scope["method"],
            path,
            scope.get("query_string", b""),
            headers,
            None if client is None else (str(client[0]), int(client[1] or 0)),
            bytes(body),
        )

    async def _pass_on(self, request: HttpRequest, send: Send) -> None:
        """Send the answer of a replica; when the replica is lost, an error in its place."""
        session = find_session(request.headers, request.body)
        handle = self.replicas.options(stream=True, session_id=session)
        stream = EventTail()
        head: HttpHead | None = None
        parts = handle.answer.remote(request)
        try:
            async for part in parts:
                if isinstance(part, HttpHead):
                    head = part
                    stream.read_head(head)
                    start = {"status": head.status, "headers": head.headers}
                    await send({"type": "http.response.start", **start})
                else:
                    stream.read_piece(part)
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        except BackPressureError:
            await _send_error(send, busy("all replicas are full; try again soon"))
            return
        except (RayError, RayServeException) as error:
            LOG.error(log_event("a replica was lost", path=request.path[:64]), exc_info=error)
            lost = unavailable(
                "the replica of this request was lost; send it again", "replica_lost"
            )
            if head is None:
                await _send_error(send, lost)
                return
            if not stream.is_events:
                raise  # a body of a known length cannot be ended otherwise
            await send({"type": "http.response.body", "body": stream.write_error(lost)})
            return
        finally:
            parts.cancel()  # of the client that has gone; a whole answer takes no notice
        await send({"type": "http.response.body", "body": b""})


class Ingress:
    """The deployment of a `RoutedApp`."""

    def __init__(self, replicas: Any, max_body_bytes: int) -> None:
        self.routed_app = RoutedApp(replicas, max_body_bytes)

    def __serve_build_asgi_app__(self) -> RoutedApp:
        return self.routed_app


async def _send_error(send: Send, error: ApiError) -> None:
    """Answer with an error."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(error.body))]
    headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": error.body})


async def _follow_lifespan(receive: Receive, send: Send) -> None:
    """Take part in the start and the end of an application."""
    while True:
        name = (await receive())["type"]
        await send({"type": f"{name}.complete"})
        if name == "lifespan.shutdown":
            return
