"""`/v1/models`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from headstock_openai_server.api.answers import Model, ModelList
from headstock_openai_server.engine.service import Service
from headstock_openai_server.routes.answering import json_response


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
