"""The ASGI application: the routes and their handlers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from headstock import HeadstockError
from headstock_openai_server.api.errors import MESSAGES_PATH, ApiError, translate_error
from headstock_openai_server.api.operations import RERANK_PATHS, RESET_PATHS, SCORE_PATHS
from headstock_openai_server.engine.service import Service
from headstock_openai_server.http.callers import allow_pages
from headstock_openai_server.http.middleware import Gate, error_response
from headstock_openai_server.observe.access_log import AccessLog
from headstock_openai_server.observe.tracing import RequestTracer
from headstock_openai_server.routes.administration import abort_request, reset_prefix_cache
from headstock_openai_server.routes.chat import answer_chat
from headstock_openai_server.routes.completions import answer_completion
from headstock_openai_server.routes.embeddings import answer_embeddings
from headstock_openai_server.routes.messages import answer_message, count_tokens
from headstock_openai_server.routes.models import (
    list_models,
    show_model,
    show_model_info,
    show_server_info,
)
from headstock_openai_server.routes.ollama import answer_generate, answer_ollama_chat
from headstock_openai_server.routes.ollama_models import (
    answer_embed,
    list_ollama_models,
    list_running_models,
    show_ollama_model,
    show_ollama_version,
)
from headstock_openai_server.routes.responses import answer_response, count_input_tokens
from headstock_openai_server.routes.scores import answer_rerank, answer_score
from headstock_openai_server.routes.status import (
    show_docs,
    show_document,
    show_health,
    show_live,
    show_load,
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
                return error_response(translate_error(error), request.scope["path"])

        return Route(path, answer, methods=[method])

    async def refuse_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path, method = request.scope["path"], request.method[:16]
        text = (
            f"there is nothing at {path[:64]}"
            if error.status_code == 404
            else f"{path[:64]} does not take {method}"
        )
        refusal = ApiError(error.status_code, text, headers=dict(error.headers or {}))
        return error_response(refusal, path)

    administration = (
        [
            route("/abort_request", "POST", abort_request),
            *(route(path, "POST", reset_prefix_cache) for path in RESET_PATHS),
        ]
        if service.settings.api_keys
        else []
    )
    router = Router(
        [
            route("/v1/chat/completions", "POST", answer_chat),
            route("/v1/completions", "POST", answer_completion),
            route("/v1/responses", "POST", answer_response),
            route("/v1/responses/input_tokens", "POST", count_input_tokens),
            route(MESSAGES_PATH, "POST", answer_message),
            route(f"{MESSAGES_PATH}/count_tokens", "POST", count_tokens),
            route("/v1/embeddings", "POST", answer_embeddings),
            *(route(path, "POST", answer_rerank) for path in RERANK_PATHS),
            *(route(path, "POST", answer_score) for path in SCORE_PATHS),
            route("/v1/models", "GET", list_models),
            # The id of a hub model contains a slash.
            route("/v1/models/{id:path}", "GET", show_model),
            route("/api/chat", "POST", answer_ollama_chat),
            route("/api/generate", "POST", answer_generate),
            route("/api/embed", "POST", answer_embed),
            route("/api/show", "POST", show_ollama_model),
            route("/api/tags", "GET", list_ollama_models),
            route("/api/ps", "GET", list_running_models),
            route("/api/version", "GET", show_ollama_version),
            route("/tokenize", "POST", tokenize),
            route("/detokenize", "POST", detokenize),
            route("/tokenizer_info", "GET", show_tokenizer),
            route("/health", "GET", show_health),
            route("/ping", "GET", show_health),
            route("/ping", "POST", show_health),
            route("/load", "GET", show_load),
            route("/version", "GET", show_version),
            route("/model_info", "GET", show_model_info),
            route("/get_model_info", "GET", show_model_info),
            route("/server_info", "GET", show_server_info),
            route("/get_server_info", "GET", show_server_info),
            route("/metrics", "GET", show_metrics),
            route("/openapi.json", "GET", show_document),
            route("/docs", "GET", show_docs),
            route("/live", "GET", show_live),
            route("/", "GET", show_page),
            *administration,
        ],
        redirect_slashes=False,  # it would build a URL from the Host header
    )
    # Not a Starlette, which handles unknown errors itself, even that of a disconnected client.
    app = ExceptionMiddleware(router, {HTTPException: refuse_http})
    # Outside the gate, so that pages can read what it refuses.
    return allow_pages(Gate(app, service, access_log, tracer), service.settings)
