"""The state of the server: health, version, metrics, OpenAPI document, the page."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import headstock
from headstock_openai_server.api.answers import Health, Load, Version
from headstock_openai_server.api.openapi import make_document
from headstock_openai_server.engine.service import Service
from headstock_openai_server.http.page import render_document, render_page
from headstock_openai_server.routes.answering import json_response
from headstock_openai_server.routes.live import make_live_view
from headstock_openai_server.settings import ServerSettings


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


async def show_load(service: Service, request: Request) -> Response:
    """`GET /load`, as vLLM has it."""
    return json_response(Load(server_load=len(service.generations)))


async def show_document(service: Service, request: Request) -> Response:
    """`GET /openapi.json`."""
    document = await asyncio.to_thread(document_server, service.settings)
    return Response(json.dumps(document), media_type="application/json")


async def show_docs(service: Service, request: Request) -> Response:
    """`GET /docs`."""
    return await asyncio.to_thread(lambda: render_document(document_server(service.settings)))


def document_server(settings: ServerSettings) -> dict[str, Any]:
    """The OpenAPI document of this server."""
    return make_document(
        has_keys=bool(settings.api_keys),
        refuses_ignored=settings.unknown_fields == "refuse",
        root_path=settings.root_path,
    )


async def show_live(service: Service, request: Request) -> Response:
    """`GET /live`: the current counts and the engine's latest snapshot."""
    stats = service.session.engine.stats()
    service.loop.request_snapshot()
    history = service.history.describe(time.monotonic())
    return json_response(make_live_view(stats, service.metrics, history, service.loop.snapshot))


async def show_page(service: Service, request: Request) -> Response:
    """`GET /`: the chat and the live view."""
    return render_page()
