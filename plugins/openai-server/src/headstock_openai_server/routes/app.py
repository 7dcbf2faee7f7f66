"""The ASGI application: which path is answered by what."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from headstock import HeadstockError
from headstock_openai_server.api.errors import ApiError, translate_error
from headstock_openai_server.engine.service import Service
from headstock_openai_server.http.middleware import Gate, error_response
from headstock_openai_server.observe.access_log import AccessLog
from headstock_openai_server.observe.tracing import RequestTracer
from headstock_openai_server.routes.chat import answer_chat
from headstock_openai_server.routes.completions import answer_completion
from headstock_openai_server.routes.embeddings import answer_embeddings
from headstock_openai_server.routes.models import (
    list_models,
    show_model,
    show_model_info,
    show_server_info,
)
from headstock_openai_server.routes.responses import answer_response
from headstock_openai_server.routes.status import (
    show_document,
    show_health,
    show_live,
    show_metrics,
    show_page,
    show_version,
)
from headstock_openai_server.routes.tokenization import detokenize, show_tokenizer, tokenize

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
            route("/v1/responses", "POST", answer_response),
            route("/v1/embeddings", "POST", answer_embeddings),
            route("/v1/models", "GET", list_models),
            # A hub id has a slash.
            route("/v1/models/{id:path}", "GET", show_model),
            route("/tokenize", "POST", tokenize),
            route("/detokenize", "POST", detokenize),
            route("/tokenizer_info", "GET", show_tokenizer),
            route("/health", "GET", show_health),
            route("/version", "GET", show_version),
            route("/model_info", "GET", show_model_info),
            route("/get_model_info", "GET", show_model_info),
            route("/server_info", "GET", show_server_info),
            route("/get_server_info", "GET", show_server_info),
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
