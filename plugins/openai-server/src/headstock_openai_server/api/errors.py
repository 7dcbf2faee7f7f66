"""Errors in the formats of OpenAI's, Anthropic's and Ollama's APIs.

OpenAI's is `{"error": {"message", "type", "param", "code"}}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from headstock import (
    CapacityError,
    EngineDied,
    HeadstockError,
    ModelError,
    NotSupported,
    RequestError,
    UsageError,
)

RETRY_SECONDS = 1
"""The value of `Retry-After`."""


class BusyError(CapacityError):
    """The queue is full now; the client should retry later."""


class ErrorBody(msgspec.Struct):
    """The content of an error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct):
    """The body of an error response, and of the last event of a stream that fails."""

    error: ErrorBody


class ErrorDetails(msgspec.Struct):
    """What Anthropic's clients recognize an error by, besides its type."""

    error_code: str


class MessagesErrorBody(msgspec.Struct, omit_defaults=True):
    """The content of an error of Anthropic's API."""

    type: str
    message: str
    details: ErrorDetails | None = None


class MessagesErrorResponse(msgspec.Struct, tag_field="type", tag="error"):
    """The body of an error response of Anthropic's API, and of the last event of a stream."""

    error: MessagesErrorBody


class OllamaErrorResponse(msgspec.Struct):
    """The body of an error response of Ollama's API, and of the last line of a stream."""

    error: str


MESSAGES_PATH = "/v1/messages"
"""The routes of Anthropic's API begin with it."""
OLLAMA_PATH = "/api/"
"""The routes of Ollama's API begin with it."""
MESSAGES_TYPES: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
    }
)
"""Status -> Anthropic's name for this type of error, where it is not that of the whole class."""


def find_error_type(path: str) -> type[msgspec.Struct]:
    """The type of error responses in the API of a path."""
    if path.startswith(MESSAGES_PATH):
        return MessagesErrorResponse
    return OllamaErrorResponse if path.startswith(OLLAMA_PATH) else ErrorResponse


class ApiError(Exception):
    """An error response. Its text is for clients: it has no paths, addresses or internals."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> bytes:
        """The JSON of the error."""
        return msgspec.json.encode(
            ErrorResponse(ErrorBody(self.message, self.type, self.param, self.code))
        )

    @property
    def messages_body(self) -> bytes:
        """The JSON of the error in Anthropic's API."""
        general = "invalid_request_error" if self.status < 500 else "api_error"
        kind = MESSAGES_TYPES.get(self.status, general)
        details = ErrorDetails(self.code) if self.code else None
        error = MessagesErrorBody(kind, self.message, details)
        return msgspec.json.encode(MessagesErrorResponse(error))

    @property
    def ollama_body(self) -> bytes:
        """The JSON of the error in Ollama's API."""
        return msgspec.json.encode(OllamaErrorResponse(self.message))

    def write_for(self, path: str) -> bytes:
        """The JSON of the error in the API of a path."""
        kind = find_error_type(path)
        if kind is MessagesErrorResponse:
            return self.messages_body
        return self.ollama_body if kind is OllamaErrorResponse else self.body

    @property
    def type(self) -> str:
        """OpenAI's name for this type of error."""
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"


def refuse(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The error for an invalid request (400)."""
    return ApiError(400, message, param=param, code=code)


def busy(message: str, code: str = "queue_full") -> ApiError:
    """The error for a request that may succeed later (429)."""
    return ApiError(429, message, code=code, headers={"retry-after": str(RETRY_SECONDS)})


def unavailable(message: str, code: str) -> ApiError:
    """The error while the server accepts no requests (503)."""
    return ApiError(503, message, code=code, headers={"retry-after": str(RETRY_SECONDS)})


def not_found(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The error for an unknown resource (404)."""
    return ApiError(404, message, param=param, code=code)


def translate_error(error: Exception) -> ApiError:
    """The client's version of one of headstock's errors."""
    match error:
        case ApiError():
            return error
        case BusyError():
            return busy(str(error))
        case NotSupported():
            return refuse(str(error), error.parameter, "unsupported")
        case CapacityError() | RequestError():
            return refuse(str(error), error.parameter)
        case EngineDied():
            return unavailable("the engine has stopped; the server is ending", "engine_dead")
        # The tokenizer or the chat template is missing or broken, which no client can fix.
        case ModelError() | UsageError():
            return refuse(str(error))
        case HeadstockError():
            return ApiError(500, str(error))
    return ApiError(500, "internal error; the server's log has the reason")
