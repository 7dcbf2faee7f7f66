"""Errors as OpenAI's API words them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from collections.abc import Mapping

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
"""What `Retry-After` says."""


class BusyError(CapacityError):
    """There is no room for a request now; retry later."""


class ErrorBody(msgspec.Struct):
    """What is in an error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct):
    """The body of an answer that is an error, and an event in a stream that ends with one."""

    error: ErrorBody


class ApiError(Exception):
    """An error to answer with. Its text is for clients: no paths, addresses or internals."""

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
    def type(self) -> str:
        """OpenAI's word for this kind of error."""
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"


def refuse(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The error for a request that is wrong (400)."""
    return ApiError(400, message, param=param, code=code)


def busy(message: str, code: str = "queue_full") -> ApiError:
    """The error for a request that may succeed a little later (429)."""
    return ApiError(429, message, code=code, headers={"retry-after": str(RETRY_SECONDS)})


def unavailable(message: str, code: str) -> ApiError:
    """The error for a server that takes no requests (503)."""
    return ApiError(503, message, code=code, headers={"retry-after": str(RETRY_SECONDS)})


def not_found(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The error for an unknown resource (404)."""
    return ApiError(404, message, param=param, code=code)


def translate_error(error: Exception) -> ApiError:
    """The error that clients see for one of headstock's own."""
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
        # Without a tokenizer or a chat template, or with a broken one: the message is the same for
        # every client, and none of them can help it.
        case ModelError() | UsageError():
            return refuse(str(error))
        case HeadstockError():
            return ApiError(500, str(error))
    return ApiError(500, "internal error; the server's log has the reason")
