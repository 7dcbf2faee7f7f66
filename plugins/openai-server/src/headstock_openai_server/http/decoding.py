"""Convert the bytes of a request to a checked body, with an error that names the fault."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from starlette.requests import Request

from headstock.errors import shorten
from headstock_openai_server.api.bodies import Body
from headstock_openai_server.api.errors import ApiError, refuse
from headstock_openai_server.api.validation import check_served, explain_invalid
from headstock_openai_server.settings import ServerSettings

LARGE_BODY = 64 << 10
"""Bytes from which a body is decoded on another thread: megabytes take many milliseconds."""
NESTED_SHARE = 8
"""A list, an object or a key takes at least as long as this many numbers."""

BodyType = TypeVar("BodyType", bound=Body)


async def read_body(request: Request, kind: type[BodyType], settings: ServerSettings) -> BodyType:
    """The checked body of a request.   raises: ApiError; ConnectionError when the client goes"""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Browsers send other types to any server without asking it first.
    if content_type != "application/json":
        raise ApiError(
            415,
            f"the content-type: expected application/json, got {shorten(content_type) or 'none'}",
        )
    data = await read_bytes(request, settings.max_body_bytes)
    check_values(data, settings.max_body_values)
    if len(data) > LARGE_BODY:
        return await asyncio.to_thread(decode_body, data, kind)
    return decode_body(data, kind)


async def read_bytes(request: Request, most: int) -> bytes:
    """The bytes of a body.   raises: ApiError (413), ConnectionError"""
    length = request.headers.get("content-length", "0")
    chunks, size = [], int(length) if length.isdecimal() else 0
    too_large = ApiError(
        413,
        f"the body has more than {most} bytes; send less",
        code="body_too_large",
        headers={"connection": "close"},  # or the rest of the body would have to be read
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
    """Raise ApiError for a body with too many values; those in its texts count too."""
    # To decode holds the interpreter's lock: ten million lists stop all streams for seconds. To
    # count takes a thousandth of that. What a text has of them are tokens, of which none has so
    # many.
    num_nested = sum(map(data.count, (b"[", b"{", b":")))
    count = max(data.count(b","), NESTED_SHARE * num_nested)
    if count > most:
        raise refuse(
            f"the body has more than {most} values, of which lists, objects and keys count "
            f"{NESTED_SHARE} times; send several requests"
        )


def decode_body(data: bytes, kind: type[BodyType]) -> BodyType:
    """The body in `data`.   raises: ApiError that names the field at fault"""
    try:
        body = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise explain_invalid(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise refuse("the body is not valid JSON") from None
    except RecursionError:
        raise refuse("the body is nested too deeply") from None
    check_served(body)
    return body
