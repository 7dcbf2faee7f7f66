"""Schemas with `strict: true` are refused where OpenAI refuses them, and followed otherwise."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headstock_openai_server.api.errors import ApiError
from headstock_openai_server.api.ignored import IgnoredFields
from headstock_openai_server.api.responses_body import ResponsesBody
from headstock_openai_server.api.schema import ChatBody
from headstock_openai_server.api.strict_schemas import check_strict
from headstock_openai_server.api.structured_outputs import read_structure
from headstock_openai_server.convert.conversations import check_strict_tools
from headstock_openai_server.convert.responses_input import make_chat_body
from headstock_openai_server.http.decoding import decode_body

LEAF = {"type": "string"}
STRICT: dict[str, Any] = {
    "type": "object",
    "properties": {"a": LEAF, "b": {"type": ["string", "null"]}},
    "required": ["b", "a"],
    "additionalProperties": False,
}
OPEN = {name: each for name, each in STRICT.items() if name != "additionalProperties"}
OPTIONAL = STRICT | {"required": ["a"]}


def wrap(inner: object, word: str = "x") -> dict[str, Any]:
    """A strict object with one property."""
    return STRICT | {"properties": {word: inner}, "required": [word]}


@pytest.mark.parametrize(
    ("schema", "path", "need"),
    [
        (OPEN, "s", "additionalProperties: false"),
        ({"type": "object"}, "s", "additionalProperties: false"),
        (STRICT | {"additionalProperties": LEAF}, "s", "additionalProperties: false"),
        (OPTIONAL, "s", "add b to required"),
        (STRICT | {"required": None}, "s", "add a to required"),
        (wrap(OPTIONAL), "s.properties.x", "add b to required"),
        (wrap({"type": "array", "items": OPEN}), "s.properties.x.items", "additionalProperties"),
        (wrap({"anyOf": [LEAF, OPEN]}), "s.properties.x.anyOf[1]", "additionalProperties"),
        (STRICT | {"$defs": {"D": OPTIONAL}}, "s.$defs.D", "add b to required"),
        ({"type": ["object", "null"]}, "s", "additionalProperties: false"),
    ],
)
def test_what_strict_mode_does_not_take_is_named(schema: Any, path: str, need: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_strict(schema, "s")
    assert caught.value.param == path and caught.value.status == 400
    assert need in caught.value.message and "or leave strict out" in caught.value.message


@pytest.mark.parametrize(
    "schema",
    [
        STRICT,
        wrap(STRICT),
        wrap({"$ref": "#"}),
        wrap({"enum": [OPEN]}),
        STRICT | {"properties": {}, "required": []},
        {"type": "array", "items": STRICT},
        True,
        None,
    ],
)
def test_a_strict_schema_is_taken(schema: Any) -> None:
    check_strict(schema, "s")


def take_chat(body: dict[str, Any]) -> None:
    data = json.dumps({"messages": [{"role": "user", "content": "hi"}], **body}).encode()
    decoded = decode_body(data, ChatBody, IgnoredFields())
    read_structure(decoded)
    check_strict_tools(decoded.tools or ())


def take_response(body: dict[str, Any]) -> None:
    decoded = decode_body(
        json.dumps({"input": "hi", **body}).encode(), ResponsesBody, IgnoredFields()
    )
    make_chat_body(decoded, 9, IgnoredFields())


@pytest.mark.parametrize("strict", [True, False, None])
def test_strict_is_asked_of_answers_and_of_tools(strict: bool | None) -> None:
    def schema_of(schema: Any) -> dict[str, Any]:
        return {"name": "it", "schema": schema, "strict": strict}

    def function_of(schema: Any) -> dict[str, Any]:
        return {"name": "f", "parameters": schema, "strict": strict}

    for schema in (STRICT, OPEN):
        for take, body, path in (
            (
                take_chat,
                {"response_format": {"type": "json_schema", "json_schema": schema_of(schema)}},
                "response_format.json_schema.schema",
            ),
            (
                take_chat,
                {"tools": [{"type": "function", "function": function_of(schema)}]},
                "tools[0].function.parameters",
            ),
            (
                take_response,
                {"text": {"format": {"type": "json_schema", **schema_of(schema)}}},
                "text.format.schema",
            ),
            (
                take_response,
                {"tools": [{"type": "function", **function_of(schema)}]},
                "tools[0].parameters",
            ),
        ):
            if schema is OPEN and strict:
                with pytest.raises(ApiError, match="is not strict") as caught:
                    take(body)
                assert caught.value.param == path
            else:
                take(body)
