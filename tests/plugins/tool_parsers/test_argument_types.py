"""Arguments written as text: the tool's own schema says what they are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from often import count_examples

from headstock import registry
from headstock.spi import Tool, ToolEventKind
from headstock_tool_parsers.argument_types import ArgumentTypes

PARSER = registry.import_implementation(registry.load_spec("tools", "qwen3_coder"))
TEXT, NUMBER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
DEFS = {
    "text": TEXT,
    "number": NUMBER,
    "a/b~c d": NUMBER,
    "circle": {"$ref": "#/$defs/circle"},
    "both": {"anyOf": [{"$ref": "#/$defs/number"}, {"$ref": "#/$defs/text"}]},
    "object": {"type": "object", "properties": {"x": {"$ref": "#/$defs/object"}}},
    "bomb": {"allOf": [{"$ref": "#/$defs/bomb"}] * 10},
    "list": [NUMBER, TEXT],
}
DEEP: dict[str, Any] = NUMBER
for _ in range(200):
    DEEP = {"allOf": [DEEP]}


def read(schema: object, text: str) -> object:
    """What the parser makes of an argument with this schema."""
    parameters = {
        "type": "object",
        "properties": {"k": schema},
        "$defs": DEFS,
        "definitions": {"old": NUMBER},
    }
    return read_argument(parameters, "k", text)


def read_argument(parameters: dict[str, Any], key: str, text: str) -> object:
    parser = PARSER((Tool(name="f", parameters=parameters),))
    answer = f"<function=f><parameter={key}>\n{text}\n</parameter></function>"
    events = [*parser.feed(answer), *parser.finish()]
    arguments = json.loads("".join(e.text for e in events if e.kind is ToolEventKind.ARGUMENTS))
    return arguments[key]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        # text is allowed, so it stays text
        ({"anyOf": [TEXT, NULL]}, "1", "1"),
        ({"anyOf": [NULL, NUMBER, TEXT]}, "1", "1"),
        ({"anyOf": [{"type": "object"}, TEXT]}, '{"a": 1}', '{"a": 1}'),
        ({"oneOf": [TEXT, {"type": "boolean"}]}, "true", "true"),
        ({"allOf": [TEXT, {"minLength": 1}]}, "1", "1"),
        ({"allOf": [{"$ref": "#/$defs/both"}, TEXT]}, "1", "1"),
        ({"$ref": "#/$defs/text"}, "1", "1"),
        ({"$ref": "#/$defs/both", "description": "x"}, "1", "1"),
        ({"$ref": "#/$defs/list/1"}, "1", "1"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, "1"]}, "1", "1"),
        ({"const": "1"}, "1", "1"),
        ({"anyOf": [{"const": "1"}, {"const": 2}]}, "1", "1"),
        ({"type": ["integer", "string"]}, "1", "1"),
        ({"type": "string", "enum": ["a"]}, "1", "1"),
        ({"type": "string", "nullable": True}, "1", "1"),
        ({"not": NUMBER}, "1", "1"),
        ({"not": {"type": "string", "pattern": "^x"}}, "1", "1"),
        ({"minLength": 1}, "1", "1"),
        ({"pattern": "^[0-9]+$"}, "1", "1"),
        ({}, "1", "1"),
        ({"description": "anything"}, '{"a": 1}', '{"a": 1}'),
        (True, "1", "1"),
        ({"if": TEXT, "then": {"minLength": 1}}, "1", "1"),
        ({"type": "any"}, "1", "1"),
        # what leads nowhere rules nothing out
        ({"$ref": "#/$defs/none"}, "1", "1"),
        ({"$ref": "#/$defs/circle"}, "1", "1"),
        ({"$ref": "#/$defs/bomb"}, "1", "1"),
        ({"anyOf": [NUMBER, {"$ref": "#/$defs/circle"}]}, "1", "1"),
        ({"$ref": "https://example.com/s#/a"}, "1", "1"),
        ({"$ref": "file:///etc/passwd"}, "1", "1"),
        (DEEP, "1", "1"),
        # text is ruled out
        ({"anyOf": [NUMBER, NULL]}, "1", 1),
        ({"oneOf": [NUMBER, {"type": "number"}]}, "1", 1),
        ({"allOf": [{"$ref": "#/$defs/both"}, NUMBER]}, "1", 1),
        ({"$ref": "#/$defs/number"}, "1", 1),
        ({"$ref": "#/$defs/a~1b~0c%20d"}, "1", 1),
        ({"$ref": "#/definitions/old"}, "1", 1),
        ({"$ref": "#/$defs/list/0"}, "1", 1),
        ({"$ref": "#/properties/k/anyOf/1", "anyOf": [NULL, NUMBER]}, "1", 1),
        ({"$ref": "#/$defs/object"}, '{"x": {}}', {"x": {}}),
        ({"$ref": "#"}, '{"k": 1}', {"k": 1}),
        ({"$ref": "#/$defs/circle", "type": "integer"}, "1", 1),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": [1.0]}, "1", 1),
        ({"enum": [{"a": [1, None]}]}, '{"a": [1, null]}', {"a": [1, None]}),
        ({"enum": ["a", 1]}, "1", 1),
        ({"const": True}, "True", True),
        ({"not": TEXT}, "1", 1),
        ({"type": "int"}, "1", 1),
        ({"type": "INTEGER"}, "1", 1),
        ({"properties": {"a": NUMBER}}, '{"a": 1}', {"a": 1}),
        ({"items": NUMBER}, "[1, 2]", [1, 2]),
        ({"minimum": 0}, "1", 1),
        ({"type": "integer"}, "2.0", 2.0),
        ({"enum": ["a"]}, '"a"', "a"),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"type": "integer", "nullable": True}, "1", 1),
        # as Python spells it
        ({"type": "boolean"}, "False", False),
        ({"anyOf": [NUMBER, NULL]}, "None", None),
        (
            {"type": "object"},
            "{'a': True, 'b': [None, 'it\\'s'],}",
            {"a": True, "b": [None, "it's"]},
        ),
        # null beside text is null, unless the schema lists the word
        ({"anyOf": [TEXT, NULL]}, "null", None),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "string", "nullable": True}, "null", None),
        ({"enum": ["a", None]}, "null", None),
        ({"enum": ["null", None]}, "null", "null"),
        (TEXT, "null", "null"),
        ({}, "null", "null"),
        # what fits no type that is allowed stays as it was written
        (NUMBER, "one", "one"),
        (NUMBER, "1.5", "1.5"),
        (NUMBER, "true", "true"),
        (NUMBER, '"1"', '"1"'),
        (NUMBER, '{"a": 1}', '{"a": 1}'),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "array"}, "a, b", "a, b"),
        ({"type": "object"}, "{'a': 1", "{'a': 1"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1" * 5000, "1" * 5000),
        ({"type": "array"}, "[" * 5000, "[" * 5000),
        ({"enum": [1, "a"]}, "2", "2"),
        ({"enum": [True]}, "1", "1"),
        ({"enum": [[1, 2]]}, "[1]", "[1]"),
        (False, "1", "1"),
        # schemas that are none
        ({"type": 7}, "1", "1"),
        ({"anyOf": "x", "enum": 3, "$ref": 4, "allOf": {}}, "1", "1"),
        ({"anyOf": []}, "1", "1"),
        ("integer", "1", "1"),
    ],
    ids=str,
)
def test_the_schema_of_an_argument_decides_its_type(
    schema: object, text: str, value: object
) -> None:
    found = read(schema, text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("parameters", "key", "value"),
    [
        ({"additionalProperties": NUMBER}, "k", 1),
        ({"additionalProperties": False}, "k", "1"),
        ({"additionalProperties": TEXT, "properties": {"k": NUMBER}}, "k", 1),
        ({"patternProperties": {"^n_": NUMBER}}, "n_1", 1),
        ({"patternProperties": {"^n_": NUMBER}}, "m_1", "1"),
        ({"patternProperties": {"^n_": TEXT}, "additionalProperties": NUMBER}, "n_1", "1"),
        ({"patternProperties": {"(": NUMBER}}, "k", "1"),
        ({"patternProperties": {"(a+)+$": NUMBER}}, "a" * 100 + "b", "1"),
        ({"patternProperties": {"a?" * 60 + "a" * 60: NUMBER}}, "a" * 60, "1"),
        ({"$ref": "#/$defs/args", "$defs": {"args": {"properties": {"k": NUMBER}}}}, "k", 1),
        ({"allOf": [{"properties": {"k": NUMBER}}, {"required": ["k"]}]}, "k", 1),
        ({"anyOf": [{"properties": {"k": NUMBER}}, {"properties": {"k": TEXT}}]}, "k", "1"),
        ({"properties": {"k": NUMBER}, "anyOf": [{"required": ["k"]}, {}]}, "k", 1),
        ({"properties": [1]}, "k", "1"),
        ({}, "k", "1"),
    ],
    ids=str,
)
def test_the_schema_of_all_arguments_decides_too(
    parameters: dict[str, Any], key: str, value: object
) -> None:
    found = read_argument(parameters, key, "1")
    assert (found, type(found)) == (value, type(value))


TYPES = st.sampled_from(["string", "integer", "number", "boolean", "null", "object", "array"])
VALUES = st.sampled_from([None, True, False, 0, 1, 1.0, 2.5, "1", "a", "null", [], {}, {"a": 1}])
LEAVES = st.booleans() | st.fixed_dictionaries(
    {},
    optional={
        "type": TYPES | st.lists(TYPES, min_size=1, max_size=3, unique=True),
        "enum": st.lists(VALUES, min_size=1, max_size=3),
        "const": VALUES,
        "$ref": st.sampled_from(["#/$defs/a", "#/$defs/b"]),
    },
)
SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "anyOf": st.lists(inner, min_size=1, max_size=3),
            "allOf": st.lists(inner, min_size=1, max_size=3),
            "type": TYPES,
        },
    ),
    max_leaves=6,
)
PLAIN = st.recursive(
    LEAVES.filter(lambda each: isinstance(each, bool) or "$ref" not in each),
    lambda inner: st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=3)}),
    max_leaves=3,
)
WORDS = st.sampled_from(
    ["1", "1.0", "2.5", "true", "True", "null", "None", "a", '"a"', "[]", "{}", '{"a": 1}', " 1 "]
)


@given(schema=SCHEMAS, a=PLAIN, b=PLAIN, text=WORDS | st.text(max_size=6))
@settings(max_examples=count_examples(400))
def test_text_that_a_schema_allows_stays_text_and_other_text_becomes_what_it_allows(
    schema: object, a: object, b: object, text: str
) -> None:
    defs = {"a": a, "b": b}
    types = ArgumentTypes({"properties": {"k": schema}, "$defs": defs})
    value = json.loads(types.spell_value("k", text))
    validator = Draft202012Validator({"allOf": [schema], "$defs": defs})
    if value is None and text.strip() == "null":
        assert validator.is_valid(None)
    elif validator.is_valid(text):
        assert value == text
    else:
        try:
            meant = json.loads(text, parse_constant=lambda text: "Infinity or no number")
        except ValueError:
            return
        if validator.is_valid(meant):
            assert validator.is_valid(value)


ANYTHING: st.SearchStrategy[Any] = st.recursive(
    VALUES | st.sampled_from(["string", "#", "#/$defs/a", "#/properties/k/anyOf/0", "%ZZ", "["]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("type", "enum", "const", "anyOf", "oneOf", "allOf", "not", "$ref"),
                    *("nullable", "properties", "patternProperties", "additionalProperties"),
                    *("k", "a", "$defs"),
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


@given(ANYTHING.filter(lambda each: isinstance(each, dict)), WORDS | st.text(max_size=6))
@settings(max_examples=count_examples(400))
def test_whatever_a_client_sends_as_a_schema_an_argument_is_its_text_or_what_that_spells(
    parameters: dict[str, Any], text: str
) -> None:
    value = json.loads(ArgumentTypes(parameters).spell_value("k", text))
    spelled = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
    assert value in (text, text.strip()) or value == json.loads(spelled)
