"""Errors that name the field at fault."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from headstock.errors import find_nearest_name, shorten
from headstock_openai_server.api.bodies import Body
from headstock_openai_server.api.errors import ApiError, refuse
from headstock_openai_server.api.ignored import IgnoredFields
from headstock_openai_server.api.unserved import HINTS, list_ignored, list_unserved
from headstock_openai_server.api.whole_numbers import convert_json

UNKNOWN_FIELD = re.compile(r"unknown field `(.*?)`(?: - at `\$\.?(.*)`)?$", re.DOTALL)
PLACE = re.compile(r" - at `(?:key in )?\$\.?(.*)`$", re.DOTALL)

BodyType = TypeVar("BodyType", bound=Body)


def convert_part(
    value: dict[str, Any], kind: type[BodyType], where: str, ignored: IgnoredFields
) -> BodyType:
    """The part of a body at `where`, checked; `ignored` gets its fields without effect.

    raises: ApiError
    """
    try:
        part = convert_json(value, kind)
    except msgspec.ValidationError as error:
        raise explain_invalid(str(error), kind, where) from None
    check_served(part, ignored, f"{where}.")
    return part


def check_served(body: Body, ignored: IgnoredFields, where: str = "") -> None:
    """Raise ApiError for the first unsupported field of the body or of a part of it; `ignored` gets
    the fields without effect.
    """
    harmless = list_ignored(body)
    for name in (*list_unserved(body), *(harmless if ignored.refuses else ())):
        hint = HINTS.get(name, "leave it out")
        raise refuse(f"{where}{name} is not supported; {hint}", f"{where}{name}", "unsupported")
    for name in harmless:
        ignored.add(f"{where}{name}")
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if isinstance(value, Body):
            check_served(value, ignored, f"{where}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], Body):
            for index, each in enumerate(value):
                if isinstance(each, Body):  # documents to rank may be texts too
                    check_served(each, ignored, f"{where}{name}[{index}].")


def explain_invalid(text: str, kind: type[Body], where: str = "") -> ApiError:
    """The error for a body, or the part of one at `where`, that does not match its type; `text` is
    msgspec's message.
    """
    unknown = UNKNOWN_FIELD.search(text)
    if unknown is not None:
        name, parent = unknown[1], unknown[2] or ""
        near = find_nearest_name(name, _list_fields(kind, parent))
        path = _join_path(where, parent, name)
        hint = f"did you mean {near}?" if near else "leave it out"
        return refuse(f"{path} is not a known field; {hint}", path, "unknown_parameter")
    place = PLACE.search(text)
    missing = re.search(r"missing required field `(.*?)`", text)
    if missing is not None:
        path = _join_path(where, place[1] if place else "", missing[1])
        return refuse(f"{path} is missing", path, "missing_required_parameter")
    path = _join_path(where, place[1] if place else "")
    reason = shorten(PLACE.sub("", text), 160)
    reason = f"{reason[0].lower()}{reason[1:]}".replace("`", "")
    return refuse(f"{path or 'the body'} is not valid: {reason}", path or None, "invalid_value")


def _list_fields(kind: type[Body], path: str) -> list[str]:
    """The fields of the body at `path` within a body of `kind`; none if there is no body."""
    part: Any = msgspec.inspect.type_info(kind)
    for name in re.findall(r"[^.\[\]]+|\[", path):
        if name == "[":
            part = getattr(part, "item_type", None)
        elif not name.isdecimal():
            fields = {field.encode_name: field.type for field in getattr(part, "fields", ())}
            part = fields.get(name)
        # The type of an optional part is a union with None.
        for each in getattr(part, "types", ()):
            if isinstance(each, msgspec.inspect.StructType | msgspec.inspect.ListType):
                part = each
    return [field.encode_name for field in getattr(part, "fields", ())]


def _join_path(*parts: str) -> str:
    return shorten(".".join(filter(None, parts)))
