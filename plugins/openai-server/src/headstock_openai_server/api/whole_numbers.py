"""Decode bodies in which a whole float, such as 16.0, is an integer where one is expected."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

MAX_WHOLE = 2.0**53
"""Beyond it, floats have no digit for the units."""

BodyType = TypeVar("BodyType", bound=msgspec.Struct)


def decode_json(data: bytes, kind: type[BodyType]) -> BodyType:
    """The body in `data`.   raises: msgspec.DecodeError, ValidationError"""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        if not _may_be_whole(error):
            raise
    return msgspec.convert(_make_whole(msgspec.json.decode(data), _inspect(kind)), kind)


def convert_json(value: dict[str, Any], kind: type[BodyType]) -> BodyType:
    """The body that a decoded object is.   raises: msgspec.ValidationError"""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        if not _may_be_whole(error):
            raise
    return msgspec.convert(_make_whole(value, _inspect(kind)), kind)


def _may_be_whole(error: msgspec.ValidationError) -> bool:
    # Clients send such floats rarely, and walking through a body takes longer than decoding it.
    return "got `float`" in str(error)


@lru_cache(maxsize=64)
def _inspect(kind: type[msgspec.Struct]) -> inspect.Type:
    return inspect.type_info(kind)


def _make_whole(value: Any, kind: inspect.Type) -> Any:
    """The value with integers in the place of whole floats where `kind` takes no floats."""
    match kind:
        case inspect.UnionType() if not any(
            isinstance(each, inspect.FloatType) for each in kind.types
        ):
            for each in kind.types:
                value = _make_whole(value, each)
        case inspect.IntType() if isinstance(value, float):
            if value.is_integer() and abs(value) <= MAX_WHOLE:
                return int(value)
        case inspect.ListType() if isinstance(value, list):
            return [_make_whole(each, kind.item_type) for each in value]
        case inspect.StructType() if isinstance(value, dict):
            types = {each.encode_name: each.type for each in kind.fields}
            return {
                name: _make_whole(each, types[name]) if name in types else each
                for name, each in value.items()
            }
    return value
