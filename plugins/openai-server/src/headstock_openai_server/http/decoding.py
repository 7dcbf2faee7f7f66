"""From the bytes of a request to a checked body, and the error that names what is wrong in it."""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

import msgspec
from starlette.requests import Request

from headstock.errors import find_nearest_name, shorten
from headstock_openai_server.api.bodies import Body
from headstock_openai_server.api.errors import ApiError, refuse
from headstock_openai_server.api.schema import ChatMessage, find_unserved

LARGE_BODY = 64 << 10
"""Bytes from which a body is decoded on another thread: megabytes take many milliseconds."""

UNKNOWN_FIELD = re.compile(r"unknown field `(.*?)`(?: - at `\$\.?(.*)`)?$", re.DOTALL)
PLACE = re.compile(r" - at `(?:key in )?\$\.?(.*)`$", re.DOTALL)

BodyType = TypeVar("BodyType", bound=Body)


async def read_body(request: Request, kind: type[BodyType], most: int) -> BodyType:
    """The checked body of a request.   raises: ApiError; ConnectionError when the client goes"""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Browsers send other types to any server without asking it first.
    if content_type != "application/json":
        raise ApiError(
            415, f"the content-type must be application/json, got {shorten(content_type) or 'none'}"
        )
    data = await read_bytes(request, most)
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
    check_served(body, "")
    messages: list[ChatMessage] = getattr(body, "messages", None) or []
    for index, message in enumerate(messages):
        check_served(message, f"messages[{index}].")
    stream_options: Body | None = getattr(body, "stream_options", None)
    if stream_options is not None:
        check_served(stream_options, "stream_options.")
    return body


def check_served(body: Body, where: str) -> None:
    """Raise ApiError for the first field that asks for what is not served."""
    unserved = find_unserved(body)
    if unserved is not None:
        name, hint = unserved
        raise refuse(f"{where}{name} is not supported; {hint}", f"{where}{name}", "unsupported")


def explain_invalid(text: str, kind: type[Body]) -> ApiError:
    """The error for a body that is not as its type says; `text` is msgspec's."""
    unknown = UNKNOWN_FIELD.search(text)
    if unknown is not None:
        name, parent = unknown[1], unknown[2] or ""
        near = None if parent else find_nearest_name(name, kind.__struct_fields__)
        path = shorten(f"{parent}.{name}" if parent else name)
        hint = f"did you mean {near}?" if near else "leave it out"
        return refuse(f"{path} is not a known field; {hint}", path, "unknown_parameter")
    place = PLACE.search(text)
    missing = re.search(r"missing required field `(.*?)`", text)
    if missing is not None:
        path = f"{place[1]}.{missing[1]}" if place else missing[1]
        return refuse(f"{path} is missing", path, "missing_required_parameter")
    where = shorten(place[1]) if place else ""
    reason = shorten(PLACE.sub("", text), 160)
    reason = f"{reason[0].lower()}{reason[1:]}".replace("`", "")
    subject = f"{where} is not valid" if where else "the body is not valid"
    return refuse(f"{subject}: {reason}", where or None, "invalid_value")
