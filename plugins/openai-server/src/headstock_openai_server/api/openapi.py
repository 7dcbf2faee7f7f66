"""The OpenAPI document, generated from the types that decode and encode bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

import headstock
from headstock_openai_server.api.answers import (
    Health,
)
from headstock_openai_server.api.errors import (
    MESSAGES_PATH,
    OLLAMA_PATH,
    ErrorResponse,
    find_error_type,
)
from headstock_openai_server.api.messages_body import (
    BLOCKS,
    ClientTool,
    MessageBody,
)
from headstock_openai_server.api.operations import (
    ADMINISTRATION,
    ANY_HOST_PATHS,
    ERRORS,
    EVENTS,
    OPEN_PATHS,
    OPERATIONS,
    Operation,
)
from headstock_openai_server.api.responses_body import (
    INPUT_ITEMS,
    FunctionTool,
    InputPart,
    NamespaceTool,
)
from headstock_openai_server.api.schema import (
    TextPart,
)
from headstock_openai_server.api.unserved import IGNORED, UNSERVED

NO_EFFECT = "no effect; the header X-Ignored-Fields names it"

REFERENCE = "#/components/schemas/{name}"

EVENT: Mapping[str, object] = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
"""Each event of a stream: JSON, or `[DONE]`."""


def make_document(
    *, has_keys: bool, refuses_ignored: bool = False, root_path: str = ""
) -> dict[str, Any]:
    """The document of a server that requires a key if it `has_keys`, and refuses fields without
    effect if it `refuses_ignored`.
    """
    operations = {**OPERATIONS, **(ADMINISTRATION if has_keys else {})}
    kinds = {
        kind
        for each in operations.values()
        for kind in (each.body, each.answer)
        if isinstance(kind, type)
    }
    kinds |= {
        ErrorResponse,
        FunctionTool,
        NamespaceTool,
        InputPart,
        *INPUT_ITEMS.values(),
        TextPart,
        *map(find_error_type, (MESSAGES_PATH, OLLAMA_PATH)),
        MessageBody,
        ClientTool,
        *BLOCKS.values(),
    }
    _, schemas = msgspec.json.schema_components(
        sorted(kinds, key=lambda kind: kind.__name__), ref_template=REFERENCE
    )
    for kind, names in UNSERVED.items():
        properties = schemas[kind.__name__]["properties"]
        for name in names:
            # Fields that are always refused are not part of the API.
            del properties[name]
    for kind, names in IGNORED.items():
        properties = schemas[kind.__name__]["properties"]
        for name in names:
            if refuses_ignored:
                del properties[name]
            else:
                properties[name]["description"] = NO_EFFECT
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in operations.items():
        paths.setdefault(path, {})[method] = _describe(path, operation, has_keys=has_keys)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "headstock", "version": headstock.__version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if root_path:
        document["servers"] = [{"url": root_path}]
    if has_keys:
        document["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return document


def _describe(path: str, operation: Operation, *, has_keys: bool) -> dict[str, Any]:
    """One operation of the document."""
    refusal = 401 if has_keys else 403
    is_open = path in (OPEN_PATHS if has_keys else ANY_HOST_PATHS)
    statuses = (*operation.statuses, 431, *(() if is_open else (refusal,)))
    # Headers that are too large are refused before the path is looked at.
    error = find_error_type(path)
    answers: dict[str, Any] = {
        str(status): _answer(ERRORS[status], ErrorResponse if status == 431 else error)
        for status in sorted(statuses)
    }
    answers["200"] = _answer("the answer", operation.answer)
    if operation.stream_type:
        schema = EVENT if operation.stream_type == EVENTS else {}
        answers["200"]["content"][operation.stream_type] = {"schema": schema}
    if operation.answer is Health:
        answers["503"] = _answer("requests are not served, and why", Health)
    described: dict[str, Any] = {"summary": operation.summary, "responses": answers}
    if operation.body is not None:
        schema = {"$ref": REFERENCE.format(name=operation.body.__name__)}
        content = {"application/json": {"schema": schema}}
        described["requestBody"] = {"required": True, "content": content}
    if operation.path_parameter is not None:
        parameter = {"name": operation.path_parameter, "in": "path", "required": True}
        described["parameters"] = [{**parameter, "schema": {"type": "string"}}]
    if has_keys and not is_open:
        described["security"] = [{"key": []}, {"header": []}]
    return described


def _answer(text: str, kind: type[msgspec.Struct] | str) -> dict[str, Any]:
    """One answer of an operation."""
    if isinstance(kind, str):
        return {"description": text, "content": {kind: {"schema": {}}}}
    schema = {"$ref": REFERENCE.format(name=kind.__name__)}
    return {"description": text, "content": {"application/json": {"schema": schema}}}
