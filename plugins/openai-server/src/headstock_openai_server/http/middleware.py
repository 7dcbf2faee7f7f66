"""What every request passes: request ids, keys, the access log, and the last word on errors."""

from __future__ import annotations

import hmac
import json
import logging
import re
import time
from collections.abc import MutableMapping
from typing import Any
from uuid import uuid4

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headstock.logs import log_event
from headstock_openai_server.api.errors import ApiError, translate_error
from headstock_openai_server.engine.generation import ClientGoneError
from headstock_openai_server.engine.service import Service
from headstock_openai_server.observe.access_log import AccessLog
from headstock_openai_server.observe.tracing import RequestTracer

LOG = logging.getLogger("headstock.serve")

RECORD = "headstock.record"
"""Where a scope has the facts of the request's line in the access log."""
OPEN_PATHS = ("/", "/health")
"""Paths that need no key. The page has no secrets: it fetches its data with a key."""
REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
QUIET_PATHS = ("/health", "/live", "/metrics")
"""Paths that probes and pages poll every few seconds; they have no line in the access log."""
CLIENT_GONE = 499
"""What the access log says of a client that left before its answer began."""


def error_response(error: ApiError) -> Response:
    """The answer that is an error."""
    return Response(error.body, error.status, error.headers, "application/json")


class Gate:
    """What every request passes: it has an id, a key is checked, its line is logged, and no error
    gets out.
    """

    # Plain ASGI: Starlette's middleware class costs 36 us for each chunk of a stream, and hides
    # that the client has gone.

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        access_log: AccessLog,
        tracer: RequestTracer | None,
    ) -> None:
        self.app = app
        self.service = service
        self.access_log = access_log
        self.tracer = tracer
        self.keys = [key.encode() for key in service.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        began = time.monotonic()
        request_id = read_request_id(scope)
        record: MutableMapping[str, Any] = {"status": CLIENT_GONE}
        scope[RECORD] = record
        scope["app"] = self.app  # or the router would write errors itself, as plain text
        is_open = False

        async def send_named(message: Message) -> None:
            nonlocal is_open
            if message["type"] == "http.response.start":
                is_open = True
                record["status"] = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
                if self.service.draining:
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        self.service.metrics.connections.inc()
        try:
            if self.keys and scope["path"] not in OPEN_PATHS and not self._has_key(scope):
                await error_response(wrong_key())(scope, receive, send_named)
            else:
                await self.app(scope, receive, send_named)
        except (ClientGoneError, ConnectionError):
            pass
        except Exception as error:
            LOG.error(log_event("a request failed", path=scope["path"][:64]), exc_info=error)
            if not is_open:
                await error_response(translate_error(error))(scope, receive, send_named)
        finally:
            self.service.metrics.connections.dec()
            self.service.metrics.http.labels(str(record["status"])).inc()
            if scope["path"] not in QUIET_PATHS:
                self._log(scope, request_id, record, time.monotonic() - began)

    def _has_key(self, scope: Scope) -> bool:
        """Whether the request brings one of the keys."""
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(values) != 1:
            return False
        scheme, _, key = values[0].partition(b" ")
        # Every key is compared, each in constant time, so that times say nothing of them.
        matches = [hmac.compare_digest(key.strip(), each) for each in self.keys]
        return scheme.lower() == b"bearer" and any(matches)

    def _log(
        self, scope: Scope, request_id: bytes, record: MutableMapping[str, Any], seconds: float
    ) -> None:
        client = scope.get("client")
        line = {
            "time": round(time.time(), 3),
            "id": request_id.decode("ascii"),
            "client": client[0] if client else None,
            "method": scope["method"],
            "path": scope["path"][:256],
            **record,
            "ms": round(1000 * seconds, 1),
        }
        self.access_log.write(json.dumps(line))
        if self.tracer is not None:
            headers = {
                name.decode("latin-1"): each.decode("latin-1") for name, each in scope["headers"]
            }
            self.tracer.add_span(scope["path"], headers, line, seconds)


def read_request_id(scope: Scope) -> bytes:
    """The client's own id of the request, or a new one; it is shown and never used as a key."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and REQUEST_ID.fullmatch(value):
            return bytes(value)
    return uuid4().hex.encode()


def wrong_key() -> ApiError:
    """The error for a request without a valid key (401)."""
    return ApiError(
        401,
        "a valid key is needed: send the header Authorization: Bearer KEY",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )
