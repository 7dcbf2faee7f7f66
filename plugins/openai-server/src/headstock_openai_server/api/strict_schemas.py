"""Schemas with `strict: true`: each object is closed, and OpenAI's requires all properties."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headstock.errors import shorten
from headstock_openai_server.api.errors import refuse

MAPS = ("properties", "$defs", "definitions")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")


def check_strict(schema: object, where: str, *, requires_all: bool = True) -> None:
    """Raise ApiError for an object in the schema at `where` that strict mode does not take.

    requires_all: whether each property must be required
    """
    # OpenAI refuses such schemas, so clients rely on each property of an answer. Anthropic only
    # refuses open objects.
    left: list[tuple[object, str]] = [(schema, where)]
    while left:
        node, path = left.pop()
        if not isinstance(node, Mapping):
            continue
        reason = _find_fault(node, requires_all=requires_all)
        if reason is not None:
            raise refuse(
                f"{shorten(path)} is not strict: {reason}, or leave strict out", shorten(path)
            )
        left += _list_children(node, path)


def _find_fault(node: Mapping[str, Any], *, requires_all: bool) -> str | None:
    """What an object's schema needs, if that is missing."""
    kind, properties = node.get("type"), node.get("properties", {})
    kinds = kind if isinstance(kind, list) else [kind]
    if "object" not in kinds and "properties" not in node:
        return None
    if node.get("additionalProperties") is not False:
        return "add additionalProperties: false"
    required = node.get("required", [])
    for name in properties if requires_all and isinstance(properties, Mapping) else ():
        if not isinstance(required, list) or name not in required:
            return f"add {shorten(name)} to required"
    return None


def _list_children(node: Mapping[str, Any], path: str) -> list[tuple[object, str]]:
    """The schemas right inside this one, and where they are."""
    children: list[tuple[object, str]] = [(node.get("items"), f"{path}.items")]
    for word in MAPS:
        if isinstance(node.get(word), Mapping):
            children += [(each, f"{path}.{word}.{name}") for name, each in node[word].items()]
    for word in LISTS:
        if isinstance(node.get(word), list):
            children += [(each, f"{path}.{word}[{i}]") for i, each in enumerate(node[word])]
    return children
