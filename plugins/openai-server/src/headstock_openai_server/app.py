"""The ASGI application: routes, keys, request ids, the access log, and the last word on errors."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from uuid import uuid4

from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import headstock
from headstock import HeadstockError
from headstock.logs import log_event
from headstock_openai_server.access_log import AccessLog
from headstock_openai_server.answering import RECORD, json_response
from headstock_openai_server.api_errors import ApiError, translate_error
from headstock_openai_server.chat import answer_chat
from headstock_openai_server.completions import answer_completion
from headstock_openai_server.conversations import make_conversation
from headstock_openai_server.decoding import read_body
from headstock_openai_server.embeddings import answer_embeddings
from headstock_openai_server.generation import ClientGoneError
from headstock_openai_server.live import make_live_view
from headstock_openai_server.openapi import make_document
from headstock_openai_server.page import render_page
from headstock_openai_server.responses import (
    DetokenizeAnswer,
    Health,
    Model,
    ModelList,
    TokenizeAnswer,
    Version,
)
from headstock_openai_server.schema import DetokenizeBody, TokenizeBody
from headstock_openai_server.service import Service
from headstock_openai_server.tracing import RequestTracer

LOG = logging.getLogger("headstock.serve")

OPEN_PATHS = ("/", "/health")
"""Paths that need no key. The page has no secret: what it shows, it asks for with one."""
REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
QUIET_PATHS = ("/health", "/live", "/metrics")
"""Paths that probes and pages ask every few seconds; they have no line in the access log."""
CLIENT_GONE = 499
"""What the access log says of a client that left before its answer began."""

Endpoint = Callable[[Service, Request], Awaitable[Response]]


def make_app(
    service: Service, access_log: AccessLog, tracer: RequestTracer | None = None
) -> ASGIApp:
    """The application of a server."""

    def route(path: str, method: str, endpoint: Endpoint) -> Route:
        async def answer(request: Request) -> Response:
            try:
                return await endpoint(service, request)
            except (ApiError, HeadstockError) as error:
                return error_response(translate_error(error))

        return Route(path, answer, methods=[method])

    async def refuse_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path, method = request.scope["path"][:64], request.method[:16]
        text = (
            f"there is nothing at {path}"
            if error.status_code == 404
            else f"{path} does not take {method}"
        )
        return error_response(ApiError(error.status_code, text, headers=dict(error.headers or {})))

    router = Router(
        [
            route("/v1/chat/completions", "POST", answer_chat),
            route("/v1/completions", "POST", answer_completion),
            route("/v1/embeddings", "POST", answer_embeddings),
            route("/v1/models", "GET", list_models),
            # A hub id has a slash.
            route("/v1/models/{id:path}", "GET", show_model),
            route("/tokenize", "POST", tokenize),
            route("/detokenize", "POST", detokenize),
            route("/health", "GET", show_health),
            route("/version", "GET", show_version),
            route("/metrics", "GET", show_metrics),
            route("/openapi.json", "GET", show_document),
            route("/live", "GET", show_live),
            route("/", "GET", show_page),
        ],
        redirect_slashes=False,  # it would build an address out of the Host header
    )
    # Not a Starlette: that answers an unknown error itself, also one that says the client has gone.
    app = ExceptionMiddleware(router, {HTTPException: refuse_http})
    return Gate(app, service, access_log, tracer)


def error_response(error: ApiError) -> Response:
    """The answer that is an error."""
    return Response(error.body, error.status, error.headers, "application/json")


async def list_models(service: Service, request: Request) -> Response:
    """`GET /v1/models`."""
    return json_response(
        ModelList(data=[describe_model(service, name) for name in service.settings.model_names])
    )


async def show_model(service: Service, request: Request) -> Response:
    """`GET /v1/models/{id}`."""
    name = service.check_model(request.path_params["id"])
    return json_response(describe_model(service, name))


def describe_model(service: Service, name: str) -> Model:
    """The card of a model.   raises: ApiError while it loads"""
    return Model(
        id=name,
        created=int(service.started),
        root=service.config.model if len(service.config.model) < 256 else name,
        max_model_len=service.session.engine.max_seq_len,
    )


async def tokenize(service: Service, request: Request) -> Response:
    """`POST /tokenize`."""
    body = await read_body(request, TokenizeBody, service.settings.max_body_bytes)
    session = service.session
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give one of prompt and messages", param="prompt")

    def encode() -> list[int]:
        if body.messages is not None:
            conversation = make_conversation(body, body.messages, service.settings.max_messages)
            return list(session.input_processor.render_chat(conversation).tokens)
        add_special = body.add_special_tokens is not False
        return session.tokenizer.encode(body.prompt or "", add_special_tokens=add_special)

    tokens = await service.run_limited(encode)
    strings = (
        [session.tokenizer.decode([token], skip_special_tokens=False) for token in tokens]
        if body.return_token_strs
        else None
    )
    return json_response(
        TokenizeAnswer(
            count=len(tokens),
            max_model_len=session.engine.max_seq_len,
            tokens=tokens,
            token_strs=strings,
        )
    )


async def detokenize(service: Service, request: Request) -> Response:
    """`POST /detokenize`."""
    body = await read_body(request, DetokenizeBody, service.settings.max_body_bytes)
    session = service.session
    service.check_model(body.model)
    for token in body.tokens:
        if not 0 <= token < session.engine.model.vocab:
            raise ApiError(
                400,
                f"tokens must be from 0 to {session.engine.model.vocab - 1}, got {token}",
                param="tokens",
            )
    decode = session.tokenizer.decode
    text = await asyncio.to_thread(decode, body.tokens, skip_special_tokens=False)
    return json_response(DetokenizeAnswer(prompt=text))


async def show_health(service: Service, request: Request) -> Response:
    """`GET /health`: 200 when requests are served, else 503 with the reason."""
    trouble = service.find_trouble()
    if trouble is None:
        return json_response(Health(status="ok"))
    stage, completed, total = service.progress
    health = (
        Health(status=trouble[0], stage=stage, completed=completed, total=total)
        if trouble[0] == "loading"
        else Health(status=trouble[0])
    )
    response = json_response(health)
    response.status_code = 503
    return response


async def show_version(service: Service, request: Request) -> Response:
    """`GET /version`."""
    return json_response(Version(version=headstock.__version__))


async def show_metrics(service: Service, request: Request) -> Response:
    """`GET /metrics`, for Prometheus."""
    return Response(
        service.metrics.render(),
        headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"},
    )


async def show_document(service: Service, request: Request) -> Response:
    """`GET /openapi.json`."""
    document = make_document(has_keys=bool(service.settings.api_keys))
    return Response(json.dumps(document), media_type="application/json")


async def show_live(service: Service, request: Request) -> Response:
    """`GET /live`: the counts of now, and what the engine held when it was last asked."""
    stats = service.session.engine.stats()
    service.loop.request_snapshot()
    return json_response(make_live_view(stats, service.metrics, service.loop.snapshot))


async def show_page(service: Service, request: Request) -> Response:
    """`GET /`: the chat and the live view."""
    return render_page()


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
