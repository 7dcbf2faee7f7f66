"""Convert an argument that a model wrote as text by a tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

from headstock_tool_parsers.json_reader import spell_json

MAX_DEPTH: Final = 32
"""Maximum nesting of schemas, including references."""

MAX_SCHEMAS: Final = 1000
"""Maximum number of schemas per query; references can multiply them."""

MAX_PATTERN: Final = 128
"""Maximum characters of a pattern, and of the argument name that it is matched with."""

TYPE_NAMES: Final = {
    **{name: name for name in ("array", "boolean", "integer", "null", "number", "object")},
    "string": "string",
    # common variants of these
    "bool": "boolean",
    "dict": "object",
    "float": "number",
    "int": "integer",
    "list": "array",
    "none": "null",
    "str": "string",
}
IMPLIED_TYPES: Final = {
    "object": ("properties", "required", "additionalProperties", "patternProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("pattern", "minLength", "maxLength", "format"),
}
"""The type of a schema without a type, by its rules."""

TYPE_RULES: Final = ("type", "enum", "const", "anyOf", "oneOf", "allOf", "not", "$ref")
NOTES: Final = {"title", "description", "default", "examples", "example", "$comment"}
SLOW_PATTERN: Final = re.compile(r"[({]|[*+?].*[*+?].*[*+?]|\[\[|--|&&|~~|\|\|", re.DOTALL)
"""Patterns that may be slow, or that Python warns about."""

OTHER_TEXT: Final = "\x00"
"""A text that is in no schema."""


class ArgumentTypes:
    """The arguments of a tool by its `parameters`, an untrusted JSON schema.

    A schema allows a value (True), rules it out (False), or leaves it open (None): where nothing is
    said, or a rule is not read here, such as a reference that leads elsewhere or in a circle.
    """

    def __init__(self, parameters: Mapping[str, object]) -> None:
        self.parameters = parameters
        self._num_schemas = 0

    def is_known(self, key: str) -> bool:
        """Whether the schema has an argument of this name, or has none at all."""
        properties = self.parameters.get("properties")
        return not isinstance(properties, Mapping) or not properties or key in properties

    def spell_value(self, key: str, text: str) -> str:
        """The JSON of an argument that was written as `text`.

        A string, unless the schema excludes it and allows the value of the text. Text that says
        null is null where the schema names both, and not that very text.
        """
        word = text.strip()
        if (
            word == "null"
            and self.allow(key, None) is True
            and self.allow(key, OTHER_TEXT) is not False
        ):
            return word
        spelled = json.dumps(text, ensure_ascii=False)
        if self.allow(key, text) is not False:
            return spelled
        if self.allow(key, word) is not False:
            return json.dumps(word, ensure_ascii=False)
        meant = spell_json(word, quotes="\"'")
        if meant is None or self.allow(key, json.loads(meant)) is False:
            return spelled
        return meant

    def allow(self, key: str, value: object) -> bool | None:
        """Whether an argument may have this value."""
        self._num_schemas = 0
        return self._allow_argument(self.parameters, key, value, 0)

    def _allow_argument(self, schema: object, key: str, value: object, depth: int) -> bool | None:
        """Whether the schema of an object allows this value under the key."""
        if not isinstance(schema, Mapping) or not self._can_look(depth):
            return None
        answers = [
            *self._check_member(schema, key, value, depth),
            *self._combine(schema, lambda each: self._allow_argument(each, key, value, depth + 1)),
        ]
        return all_of(answers)

    def _check_member(
        self, schema: Mapping[str, Any], key: str, value: object, depth: int
    ) -> Iterator[bool | None]:
        """Evaluate the rules for members of an object."""
        properties, patterns = schema.get("properties"), schema.get("patternProperties")
        is_named = False
        if isinstance(properties, Mapping) and key in properties:
            is_named = True
            yield self._allow(properties[key], value, depth + 1)
        for pattern, each in patterns.items() if isinstance(patterns, Mapping) else ():
            is_match = match_pattern(str(pattern), key)
            if is_match is not False:
                is_named = True
                yield any_of([self._allow(each, value, depth + 1)] + [None] * (is_match is None))
        if not is_named and isinstance(schema.get("additionalProperties"), Mapping):
            yield self._allow(schema["additionalProperties"], value, depth + 1)

    def _allow(self, schema: object, value: object, depth: int) -> bool | None:
        """Whether a schema allows a value."""
        if schema is False:
            return False
        if not isinstance(schema, Mapping) or not self._can_look(depth):
            return None
        if value is None and schema.get("nullable") is True:
            return True
        answers = [
            *check_value(schema, value),
            *self._combine(schema, lambda each: self._allow(each, value, depth + 1)),
        ]
        # With rules that are not read here, the answer must not be negated.
        negated = schema.get("not")
        if isinstance(negated, Mapping) and negated.keys() <= {"type", "enum", "const", *NOTES}:
            answers.append(False if self._allow(negated, value, depth + 1) is True else None)
        return all_of(answers)

    def _combine(
        self, schema: Mapping[str, Any], look: Callable[[object], bool | None]
    ) -> Iterator[bool | None]:
        """Evaluate the schemas that this one is composed of."""
        if isinstance(schema.get("$ref"), str):
            yield look(self._resolve(schema["$ref"]))
        if isinstance(schema.get("allOf"), list):
            yield all_of([look(each) for each in schema["allOf"]])
        for rule in ("anyOf", "oneOf"):
            if isinstance(schema.get(rule), list) and schema[rule]:
                yield any_of([look(each) for each in schema[rule]])

    def _can_look(self, depth: int) -> bool:
        self._num_schemas += 1
        return depth <= MAX_DEPTH and self._num_schemas <= MAX_SCHEMAS

    def _resolve(self, reference: str) -> object:
        """The target of a reference within `parameters`; None for any other."""
        found: object = self.parameters
        first, *steps = unquote(reference).split("/")
        if first != "#":
            return None
        for step in steps:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping):
                found = found.get(step)
            elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
                found = found[int(step)]
            else:
                return None
        return found


def check_value(schema: Mapping[str, Any], value: object) -> Iterator[bool | None]:
    """Evaluate the rules of a schema that need no other schema."""
    if "type" in schema:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        yield any_of([has_type(value, each) for each in types])
    if isinstance(schema.get("enum"), list):
        yield any(is_same(value, each) for each in schema["enum"])
    if "const" in schema:
        yield is_same(value, schema["const"])
    if not any(rule in schema for rule in TYPE_RULES):
        implied = [name for name, rules in IMPLIED_TYPES.items() if any(r in schema for r in rules)]
        if implied:
            yield any_of([has_type(value, each) for each in implied])


def has_type(value: object, name: object) -> bool | None:
    """Whether a value is of the named type; None for an unknown type."""
    known = TYPE_NAMES.get(name.lower()) if isinstance(name, str) else None
    match known:
        case None:
            return None
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case "array":
            return isinstance(value, list)
        case "object":
            return isinstance(value, dict)
        case _ if isinstance(value, bool):
            return False
        case "integer":
            return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return isinstance(value, int | float)


def is_same(value: object, other: object) -> bool:
    """Whether two JSON values are equal; 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(is_same, value, other))
    if isinstance(value, dict) and isinstance(other, Mapping):
        return value.keys() == other.keys() and all(
            is_same(value[key], other[key]) for key in value
        )
    return value == other


def match_pattern(pattern: str, key: str) -> bool | None:
    """Whether a key matches; None for a pattern that may be slow or is invalid."""
    if max(len(pattern), len(key)) > MAX_PATTERN or SLOW_PATTERN.search(pattern):
        return None
    try:
        return re.search(pattern, key) is not None
    except re.error:
        return None


def all_of(answers: Iterable[bool | None]) -> bool | None:
    """Combine rules that must all hold."""
    found = set(answers)
    return False if False in found else True if True in found else None


def any_of(answers: Iterable[bool | None]) -> bool | None:
    """Combine rules of which one must hold."""
    found = set(answers)
    return True if True in found else None if None in found else False
