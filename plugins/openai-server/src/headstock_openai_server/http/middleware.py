"""The middleware: request ids, API keys, the access log, and the last error handler."""

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

from headstock.errors import shorten
from headstock.logs import log_event
from headstock_openai_server.api.errors import MESSAGES_PATH, ApiError, translate_error
from headstock_openai_server.api.ignored import IgnoredFields
from headstock_openai_server.api.operations import ANY_HOST_PATHS, OPEN_PATHS
from headstock_openai_server.engine.generation import ClientGoneError
from headstock_openai_server.engine.service import Service
from headstock_openai_server.http.callers import make_host_check, read_name
from headstock_openai_server.http.decoding import IGNORED
from headstock_openai_server.observe.access_log import AccessLog
from headstock_openai_server.observe.tracing import RequestTracer

LOG = logging.getLogger("headstock.serve")

RECORD = "headstock.record"
"""The key of a scope's fields for the access log."""
REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
QUIET_PATHS = ("/health", "/live", "/load", "/metrics", "/ping")
"""Paths that probes and pages poll every few seconds; they have no line in the access log."""
IGNORED_HEADER = b"x-ignored-fields"
CLIENT_GONE = 499
"""The status in the access log if the client disconnected before the response began."""


def error_response(error: ApiError, path: str) -> Response:
    """The error as a response on a path."""
    return Response(error.write_for(path), error.status, error.headers, "application/json")


class Gate:
    """The middleware of every request: it assigns an id, checks the key, logs a line and handles
    all errors.
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
        self.ignored_paths: set[str] = set()
        settings = service.settings
        self.keys = [key.encode() for key in settings.api_keys]
        self.hosts = make_host_check(settings)
        self.root_path = settings.root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        began = time.monotonic()
        request_id = read_request_id(scope)
        record: MutableMapping[str, Any] = {"status": CLIENT_GONE}
        scope[RECORD] = record
        scope["app"] = self.app  # otherwise the router would write errors itself, as plain text
        # Some proxies take away the path that they show the server under, others do not.
        if self.root_path and f"{scope['path']}/".startswith(f"{self.root_path}/"):
            scope["path"] = scope["path"].removeprefix(self.root_path) or "/"
        path = scope["path"]
        is_open = False

        async def send_named(message: Message) -> None:
            nonlocal is_open
            if message["type"] == "http.response.start":
                is_open = True
                record["status"] = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
                if IGNORED in scope and scope[IGNORED].paths:
                    message["headers"].append((IGNORED_HEADER, self._name_ignored(scope[IGNORED])))
                if path.startswith(MESSAGES_PATH):
                    message["headers"].append((b"request-id", request_id))  # Anthropic's name
                if self.service.draining:
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        self.service.metrics.connections.inc()
        try:
            refusal = self._find_refusal(scope)
            answer = self.app if refusal is None else error_response(refusal, path)
            await answer(scope, receive, send_named)
        except (ClientGoneError, ConnectionError):
            pass
        except Exception as error:
            LOG.error(log_event("a request failed", path=path[:64]), exc_info=error)
            if not is_open:
                await error_response(translate_error(error), path)(scope, receive, send_named)
        finally:
            self.service.metrics.connections.dec()
            self.service.metrics.http.labels(str(record["status"])).inc()
            if path not in QUIET_PATHS:
                self._log(scope, request_id, record, time.monotonic() - began)

    def _find_refusal(self, scope: Scope) -> ApiError | None:
        """Why this request may not be answered, if it may not."""
        path = scope["path"]
        if self.keys and path not in OPEN_PATHS and not self._has_key(scope):
            return wrong_key()
        if self.hosts is not None and path not in ANY_HOST_PATHS:
            host = next((value for name, value in scope["headers"] if name == b"host"), None)
            # HTTP/1.0, which no browser speaks, may have none.
            if host is not None and not self.hosts.allows(host):
                return wrong_host(host)
        return None

    def _has_key(self, scope: Scope) -> bool:
        """Whether the request has one of the keys."""
        # Every key is compared in constant time, so that timing reveals nothing.
        matches = [hmac.compare_digest(key, each) for key in list_keys(scope) for each in self.keys]
        return any(matches)

    def _name_ignored(self, ignored: IgnoredFields) -> bytes:
        """The names of fields without effect; the log gets the new ones."""
        # Only declared fields are ignored, so that clients cannot fill the log.
        for path in sorted(ignored.paths - self.ignored_paths):
            LOG.warning(log_event("a field of a request has no effect", field=path))
        self.ignored_paths |= ignored.paths
        return ", ".join(sorted(ignored.paths)).encode()

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
    """The client's id of the request, or a new one; it is only shown, never a lookup key."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and REQUEST_ID.fullmatch(value):
            return bytes(value)
    return uuid4().hex.encode()


def list_keys(scope: Scope) -> list[bytes]:
    """The keys of a request: as a bearer, and in the header of Anthropic's clients.

    A header that comes twice has none.
    """
    bearers = [value for name, value in scope["headers"] if name == b"authorization"]
    keys = [value for name, value in scope["headers"] if name == b"x-api-key"]
    found = keys if len(keys) == 1 else []
    if len(bearers) == 1:
        scheme, _, key = bearers[0].partition(b" ")
        found += [key.strip()] if scheme.lower() == b"bearer" else []
    return found


def wrong_key() -> ApiError:
    """The error for a request without a valid key (401)."""
    return ApiError(
        401,
        "a valid key is needed: send the header Authorization: Bearer KEY, or x-api-key: KEY",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def wrong_host(host: bytes) -> ApiError:
    """The error for a request by a name that may be a foreign page's (403)."""
    name = shorten(read_name(host))
    return ApiError(
        403,
        f"this server has no API key, so it is not called {name}; start it with --allowed-hosts "
        f"{name} or with --api-key, or call it localhost or by its numeric address",
        code="host_not_allowed",
    )
