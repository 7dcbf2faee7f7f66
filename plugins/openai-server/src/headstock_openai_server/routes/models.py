"""`/v1/models`, and `/model_info` and `/server_info` for routers."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

import headstock
from headstock_openai_server.api.answers import Model, ModelInfo, ModelList, ServerInfo
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
        root=find_path(service, name),
        max_model_len=service.session.engine.max_seq_len,
    )


async def show_model_info(service: Service, request: Request) -> Response:
    """`GET /model_info`, which SGLang also calls `/get_model_info`."""
    service.check_serving()
    path = find_path(service, service.settings.model_names[0])
    return json_response(ModelInfo(model_path=path, tokenizer_path=path))


async def show_server_info(service: Service, request: Request) -> Response:
    """`GET /server_info`, which SGLang also calls `/get_server_info`."""
    name = service.settings.model_names[0]
    return json_response(
        ServerInfo(
            model_path=find_path(service, name),
            served_model_name=name,
            version=headstock.__version__,
            tp_size=service.config.tp,
            max_model_len=service.session.engine.max_seq_len,
        )
    )


def find_path(service: Service, name: str) -> str:
    """The configured model, or `name` if it is too long to show."""
    return service.config.model if len(service.config.model) < 256 else name
