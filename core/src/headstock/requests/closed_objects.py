"""Close the objects of a JSON schema: a model that may write any member rarely stops."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from attrs import evolve

from headstock.sampling_params import SamplingParams
from headstock.spi import Tool

MAPS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
SINGLES: Final = (
    *("items", "additionalItems", "additionalProperties", "contains", "then", "else"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
"""Keywords whose values are schemas: by name, in lists, and alone. A closed object in `not` or `if`
would mean the opposite.
"""
SAYS_ENOUGH: Final = ("additionalProperties", "unevaluatedProperties")
COMPOSES: Final = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "dependentSchemas")
"""Keywords that may add members to an object which the schema describes itself."""

Node = dict[str, Any]


class _Unsure(Exception):
    """A reference leads where this module does not look."""


def close_objects(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema with `"additionalProperties": false` in each object that lists its properties and
    does not say what else it may have, outside of what combines schemas.
    """
    try:
        nodes = list(_list_nodes(schema))
        kept_open: set[int] = set()
        for node in nodes:
            for part in _list_parts(node, schema):
                _keep_open(part, schema, kept_open)
        closed = {id(node) for node in nodes if id(node) not in kept_open and _is_open(node)}
        copied: Mapping[str, Any] = _copy_closed(schema, closed)
        return copied
    except (_Unsure, RecursionError):
        return schema


def close_params(params: SamplingParams) -> SamplingParams:
    """The parameters with the objects of their schema closed, if they have one."""
    outputs = params.structured_outputs
    if outputs is None or outputs.json is None:
        return params
    schema = json.loads(outputs.json)
    if not isinstance(schema, Mapping):
        return params
    return params.replace({"structured_outputs": evolve(outputs, json=close_objects(schema))})


def close_tool(tool: Tool) -> Tool:
    """The tool with the objects of its arguments closed."""
    return evolve(tool, parameters=close_objects(tool.parameters))


def _list_children(node: Mapping[str, Any]) -> Iterator[object]:
    """The schemas right inside this one."""
    for name in MAPS:
        if isinstance(node.get(name), Mapping):
            yield from node[name].values()
    for name in LISTS:
        if isinstance(node.get(name), list):
            yield from node[name]
    for name in SINGLES:
        yield node.get(name)


def _list_nodes(schema: object) -> Iterator[Mapping[str, Any]]:
    """All schemas inside this one, and itself."""
    if isinstance(schema, Mapping):
        yield schema
        for child in _list_children(schema):
            yield from _list_nodes(child)


def _is_open(node: Mapping[str, Any]) -> bool:
    """Whether the schema lists all members of an object, and leaves it open for others."""
    properties, required = node.get("properties"), node.get("required", [])
    return (
        isinstance(properties, Mapping)
        and not any(name in node for name in (*SAYS_ENOUGH, *COMPOSES))
        and isinstance(required, list)
        and all(name in properties for name in required if isinstance(name, str))
    )


def _list_parts(node: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[object]:
    """The schemas that describe the same object as this one, which none of them may close.

    raises: _Unsure
    """
    for name in ("not", "if", "then", "else"):
        yield node.get(name)
    if isinstance(node.get("dependentSchemas"), Mapping):
        yield from node["dependentSchemas"].values()
    # One schema of anyOf describes a whole object, unless another keyword describes it too.
    num_others = sum(name in node for name in (*COMPOSES, "properties", "patternProperties"))
    if "allOf" in node or num_others > 1:
        yield from _list_alternatives(node, root)


def _list_alternatives(node: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[object]:
    """The schemas that a schema is composed of.   raises: _Unsure"""
    for name in ("allOf", "anyOf", "oneOf"):
        if isinstance(node.get(name), list):
            yield from node[name]
    if "$ref" in node or "$dynamicRef" in node:
        yield _resolve(node.get("$ref"), root)


def _keep_open(node: object, root: Mapping[str, Any], kept_open: set[int]) -> None:
    """Add a schema, and those that it is composed of, to those that are kept open."""
    if isinstance(node, Mapping) and id(node) not in kept_open:
        kept_open.add(id(node))
        for part in _list_alternatives(node, root):
            _keep_open(part, root, kept_open)


def _resolve(reference: object, root: Mapping[str, Any]) -> object:
    """The target of a reference within `root`.   raises: _Unsure"""
    first, *steps = reference.split("/") if isinstance(reference, str) else [""]
    target: object = root
    if first != "#":
        raise _Unsure
    for step in steps:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping) and name in target:
            target = target[name]
        elif isinstance(target, list) and name.isdecimal() and int(name) < len(target):
            target = target[int(name)]
        else:
            raise _Unsure
    return target


def _copy_closed(value: Any, closed: set[int]) -> Any:
    """A copy in which the schemas of `closed` allow no other members."""
    if isinstance(value, list):
        return [_copy_closed(each, closed) for each in value]
    if not isinstance(value, Mapping):
        return value
    copied = {name: _copy_closed(each, closed) for name, each in value.items()}
    return copied | {"additionalProperties": False} if id(value) in closed else copied
