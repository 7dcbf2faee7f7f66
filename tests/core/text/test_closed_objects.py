"""Objects of schemas are closed where their schema lists what they have."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from headstock import SamplingParams
from headstock.requests.closed_objects import close_objects, close_params

from .test_chat_answers import TALK, Make

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = A | {"additionalProperties": False}
B: dict[str, Any] = {"properties": {"b": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (A, CLOSED),
        ({"type": "object", "properties": {}}, {"additionalProperties": False}),
        ({"items": A, "$defs": {"X": A}}, {"items": CLOSED, "$defs": {"X": CLOSED}}),
        ({"properties": {"x": A}}, {"properties": {"x": CLOSED}, "additionalProperties": False}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"$ref": "#/$defs/X", "$defs": {"X": A}}, {"$defs": {"X": CLOSED}}),
        ({"enum": [A], "default": A, "const": A}, {}),
        ({"type": "object"}, {}),
        (A | {"additionalProperties": True}, {}),
        (A | {"unevaluatedProperties": {}}, {}),
        (A | {"required": ["other"]}, {}),
        # What describes one object together must not close it alone.
        ({"allOf": [A, B]}, {}),
        (A | {"allOf": [B]}, {}),
        (A | {"anyOf": [B, {}]}, {}),
        ({"allOf": [{"$ref": "#/$defs/X"}, B], "$defs": {"X": A}}, {}),
        ({"allOf": [{"anyOf": [{"$ref": "#/$defs/X"}]}], "$defs": {"X": A}}, {}),
        (A | {"$ref": "#/$defs/X", "$defs": {"X": B}}, {}),
        ({"not": A}, {}),
        ({"not": {"properties": {"x": A}}}, {}),
        (A | {"if": B, "then": B}, {}),
        ({"allOf": [{"$ref": "https://example.com/x"}], "items": A}, {}),
        ({"allOf": [{"properties": {"x": A}}]}, {"allOf": [{"properties": {"x": CLOSED}}]}),
    ],
    ids=json.dumps,
)
def test_an_object_is_closed_where_its_schema_lists_all_of_it(
    schema: dict[str, Any], closed: dict[str, Any]
) -> None:
    before = json.dumps(schema)
    assert close_objects(schema) == schema | closed
    assert json.dumps(schema) == before, "the caller's schema is not changed"


NAMES = st.sampled_from("abc")
SCHEMAS = st.recursive(
    st.sampled_from([{}, {"type": "integer"}, {"$ref": "#/$defs/X"}]),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "properties": st.dictionaries(NAMES, inner, max_size=2),
            "required": st.lists(NAMES, max_size=2),
            "additionalProperties": st.booleans(),
            "anyOf": st.lists(inner, min_size=1, max_size=2),
            "allOf": st.lists(inner, min_size=1, max_size=2),
        },
    ),
    max_leaves=6,
)
VALUES = st.recursive(
    st.integers(0, 1), lambda inner: st.dictionaries(NAMES, inner, max_size=3), max_leaves=5
)


@given(SCHEMAS, st.fixed_dictionaries({"properties": st.dictionaries(NAMES, SCHEMAS)}), VALUES)
def test_a_closed_schema_takes_nothing_that_the_open_one_refuses(
    schema: dict[str, Any], shared: dict[str, Any], value: Any
) -> None:
    if '"$ref": "#/$defs/X"' in json.dumps(shared):
        shared = {}  # it would refer to itself for ever
    schema = schema | {"$defs": {"X": shared}}
    closed = close_objects(schema)
    if Draft202012Validator(closed).is_valid(value):
        assert Draft202012Validator(schema).is_valid(value)
    assert close_objects(closed) == closed


def test_every_request_has_closed_objects_unless_a_setting_opens_them(scripted: Make) -> None:
    params = SamplingParams(max_tokens=1, structured_outputs={"json": A})  # type: ignore[arg-type]
    for settings, wanted in (({}, CLOSED), ({"open_objects": True}, A)):
        llm, loop = scripted(**settings)
        llm.generate("hi", params)
        llm.chat(TALK, params)
        for request in loop.seen:
            assert json.loads(request.params.structured_outputs.json) == wanted
    for plain in ({"regex": "a"}, {"json": True}, {"json_object": True}):
        other = SamplingParams(structured_outputs=plain)  # type: ignore[arg-type]
        assert close_params(other) == other
