"""Decode a request to a validated body; errors name the field at fault."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from starlette.requests import Request

from headstock.errors import shorten
from headstock_openai_server.api.bodies import Body
from headstock_openai_server.api.errors import OLLAMA_PATH, ApiError, refuse
from headstock_openai_server.api.ignored import IgnoredFields
from headstock_openai_server.api.validation import check_served, explain_invalid
from headstock_openai_server.api.whole_numbers import decode_json
from headstock_openai_server.http.callers import is_from_page
from headstock_openai_server.settings import ServerSettings

LARGE_BODY = 64 << 10
"""Larger bodies are decoded on another thread: megabytes take many milliseconds."""
NESTED_SHARE = 8
"""A list, an object or a key takes as long to decode as this many numbers."""

UNNAMED_TYPES = ("", "application/x-www-form-urlencoded")
"""What clients of Ollama send that say nothing of a body's type; the second is curl's."""

IGNORED = "headstock.ignored"
"""The key of a scope's fields without effect."""

BodyType = TypeVar("BodyType", bound=Body)


async def read_body(request: Request, kind: type[BodyType], settings: ServerSettings) -> BodyType:
    """The checked body of a request, whose scope gets the fields without effect.

    raises: ApiError, ConnectionError
    """
    check_content_type(request)
    data = await read_bytes(request, settings.max_body_bytes)
    check_values(data, settings.max_body_values)
    ignored = IgnoredFields(refuses=settings.unknown_fields == "refuse")
    request.scope[IGNORED] = ignored
    if len(data) > LARGE_BODY:
        return await asyncio.to_thread(decode_body, data, kind, ignored)
    return decode_body(data, kind, ignored)


def check_content_type(request: Request) -> None:
    """Raise ApiError (415) for a body that is not said to be JSON.

    Ollama's routes take a body of which nothing is said for JSON too, but from no page.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return
    # Browsers send other types to any server without a preflight request.
    is_ollama = request.scope["path"].startswith(OLLAMA_PATH)
    if not (is_ollama and kind in UNNAMED_TYPES) or is_from_page(request.headers):
        raise ApiError(
            415, f"the content-type: expected application/json, got {shorten(kind) or 'none'}"
        )


async def read_bytes(request: Request, most: int) -> bytes:
    """The bytes of a body.   raises: ApiError (413), ConnectionError"""
    length = request.headers.get("content-length", "0")
    chunks, size = [], int(length) if length.isdecimal() else 0
    too_large = ApiError(
        413,
        f"the body has more than {most} bytes; send less",
        code="body_too_large",
        headers={"connection": "close"},  # otherwise the rest of the body would have to be read
    )
    if size > most:
        raise too_large
    size, more = 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client has gone")
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > most:
            raise too_large
        more = message.get("more_body", False)
    return b"".join(chunks)


def check_values(data: bytes, most: int) -> None:
    """Raise ApiError for a body with too many values; lookalikes inside strings count too."""
    # Decoding holds the GIL: ten million lists stop all streams for seconds. Counting takes a
    # thousandth of that. Brackets and commas inside strings are tokens, and no prompt has that
    # many.
    num_nested = sum(map(data.count, (b"[", b"{", b":")))
    count = max(data.count(b","), NESTED_SHARE * num_nested)
    if count > most:
        raise refuse(
            f"the body has more than {most} values, of which lists, objects and keys count "
            f"{NESTED_SHARE} times; send several requests"
        )


def decode_body(data: bytes, kind: type[BodyType], ignored: IgnoredFields) -> BodyType:
    """The body in `data`; `ignored` gets its fields without effect.

    raises: ApiError that names the field at fault
    """
    try:
        body = decode_json(data, kind)
    except msgspec.ValidationError as error:
        raise explain_invalid(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise refuse("the body is not valid JSON") from None
    except RecursionError:
        raise refuse("the body is nested too deeply") from None
    check_served(body, ignored)
    return body
