"""The OpenAPI document of the server, made of the very types that read and write bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from attrs import frozen

import headstock
from headstock_openai_server.api.answers import (
    ChatCompletion,
    Completion,
    DetokenizeAnswer,
    EmbeddingList,
    Health,
    LiveView,
    Model,
    ModelInfo,
    ModelList,
    ServerInfo,
    TokenizeAnswer,
    TokenizerInfo,
    Version,
)
from headstock_openai_server.api.errors import ErrorResponse
from headstock_openai_server.api.responses_answer import ResponseObject
from headstock_openai_server.api.responses_body import (
    INPUT_ITEMS,
    FunctionTool,
    InputPart,
    NamespaceTool,
    ResponsesBody,
)
from headstock_openai_server.api.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    TokenizeBody,
)
from headstock_openai_server.api.unserved import UNSERVED

REFERENCE = "#/components/schemas/{name}"

ERRORS: Mapping[int, str] = {
    400: "the request is wrong",
    401: "no valid key",
    404: "there is no such model",
    413: "the body is too large",
    415: "the body is not JSON",
    429: "the queue is full",
    431: "the headers are too large",
    500: "the step of this request failed",
    503: "the model is being loaded, or the server ends",
}
"""What each status of an error means."""

EVENT: Mapping[str, object] = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
"""Each event of a stream: JSON, or `[DONE]`."""


@frozen(kw_only=True)
class Operation:
    """One route: what it reads and answers, and the statuses that it may answer with."""

    summary: str
    answer: type[msgspec.Struct] | str
    body: type[msgspec.Struct] | None = None
    statuses: tuple[int, ...] = ()
    streams: bool = False
    path_parameter: str | None = None


ANSWERING = (400, 404, 413, 415, 429, 500, 503)
READING = (400, 404, 413, 415, 500, 503)

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("post", "/v1/chat/completions"): Operation(
        summary="Answer a conversation",
        body=ChatBody,
        answer=ChatCompletion,
        statuses=ANSWERING,
        streams=True,
    ),
    ("post", "/v1/completions"): Operation(
        summary="Complete prompts",
        body=CompletionBody,
        answer=Completion,
        statuses=ANSWERING,
        streams=True,
    ),
    ("post", "/v1/responses"): Operation(
        summary="Answer a conversation, as the Responses API does; nothing is stored",
        body=ResponsesBody,
        answer=ResponseObject,
        statuses=ANSWERING,
        streams=True,
    ),
    ("post", "/v1/embeddings"): Operation(
        summary="Make vectors of texts",
        body=EmbeddingBody,
        answer=EmbeddingList,
        statuses=ANSWERING,
    ),
    ("get", "/v1/models"): Operation(summary="List the models", answer=ModelList, statuses=(503,)),
    ("get", "/v1/models/{id}"): Operation(
        summary="Describe a model", answer=Model, statuses=(404, 503), path_parameter="id"
    ),
    ("post", "/tokenize"): Operation(
        summary="Tokenize a prompt or a conversation",
        body=TokenizeBody,
        answer=TokenizeAnswer,
        statuses=READING,
    ),
    ("post", "/detokenize"): Operation(
        summary="Write token ids as text",
        body=DetokenizeBody,
        answer=DetokenizeAnswer,
        statuses=READING,
    ),
    ("get", "/tokenizer_info"): Operation(
        summary="Show the tokenizer's configuration and the chat template",
        answer=TokenizerInfo,
        statuses=(400, 503),
    ),
    ("get", "/health"): Operation(summary="Say whether requests are served", answer=Health),
    ("get", "/version"): Operation(summary="Show the version", answer=Version),
    **{
        ("get", path): Operation(
            summary="Describe the model, for routers", answer=ModelInfo, statuses=(503,)
        )
        for path in ("/model_info", "/get_model_info")
    },
    **{
        ("get", path): Operation(
            summary="Describe the server, for routers", answer=ServerInfo, statuses=(503,)
        )
        for path in ("/server_info", "/get_server_info")
    },
    ("get", "/metrics"): Operation(summary="Show counts and times", answer="text/plain"),
    ("get", "/openapi.json"): Operation(summary="Show this document", answer="application/json"),
    ("get", "/live"): Operation(
        summary="Show what runs, waits and is cached", answer=LiveView, statuses=(503,)
    ),
    ("get", "/"): Operation(summary="Show a page for people", answer="text/html"),
}
"""Method and path -> the operation."""


def make_document(*, has_keys: bool) -> dict[str, Any]:
    """The document of a server, which asks for a key if it `has_keys`."""
    kinds = {
        kind
        for each in OPERATIONS.values()
        for kind in (each.body, each.answer)
        if isinstance(kind, type)
    }
    kinds |= {ErrorResponse, FunctionTool, NamespaceTool, InputPart, *INPUT_ITEMS.values()}
    _, schemas = msgspec.json.schema_components(
        sorted(kinds, key=lambda kind: kind.__name__), ref_template=REFERENCE
    )
    for kind, names in UNSERVED.items():
        properties = schemas[kind.__name__]["properties"]
        for name in names:
            # What is refused whatever it holds is no part of what clients may send.
            del properties[name]
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method] = _describe(path, operation, has_keys=has_keys)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "headstock", "version": headstock.__version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if has_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _describe(path: str, operation: Operation, *, has_keys: bool) -> dict[str, Any]:
    """One operation of the document."""
    needs_key = has_keys and path not in ("/", "/health")
    statuses = (*operation.statuses, 431, *((401,) if needs_key else ()))
    answers: dict[str, Any] = {
        str(status): _answer(ERRORS[status], ErrorResponse) for status in sorted(statuses)
    }
    answers["200"] = _answer("the answer", operation.answer)
    if operation.streams:
        answers["200"]["content"]["text/event-stream"] = {"schema": EVENT}
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
    if needs_key:
        described["security"] = [{"key": []}]
    return described


def _answer(text: str, kind: type[msgspec.Struct] | str) -> dict[str, Any]:
    """One answer of an operation."""
    if isinstance(kind, str):
        return {"description": text, "content": {kind: {"schema": {}}}}
    schema = {"$ref": REFERENCE.format(name=kind.__name__)}
    return {"description": text, "content": {"application/json": {"schema": schema}}}
