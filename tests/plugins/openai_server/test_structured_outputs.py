"""Structured outputs over HTTP, and grammars that harm nobody."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from served import Served

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
QUESTION = {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 60}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def schema_format(schema: Any) -> dict[str, Any]:
    """A response format as OpenAI's client sends it."""
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


@pytest.mark.feature("W5")
def test_an_answer_follows_its_schema_whole_and_as_a_stream(server: Served) -> None:
    body = QUESTION | {"response_format": schema_format(SCHEMA), "temperature": 1, "seed": 3}
    (choice,) = server.post(CHAT, body).json["choices"]
    assert choice["finish_reason"] == "stop"
    found = json.loads(choice["message"]["content"])
    assert found.keys() == {"name", "age"} and 1 <= found["age"] <= 99 and len(found["name"]) <= 8

    stream = server.post(CHAT, body | {"stream": True}).body.decode()
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(pieces) == choice["message"]["content"] and len(pieces) > 5

    structure = {"format": {"type": "json_schema", "name": "it", "schema": SCHEMA, "strict": True}}
    asked = {
        "input": "Who?",
        "text": structure,
        "temperature": 1,
        "seed": 3,
        "max_output_tokens": 60,
    }
    response = server.post("/v1/responses", asked).json
    assert response["output"][0]["content"][0]["text"] == choice["message"]["content"]
    assert response["text"] == structure


@pytest.mark.feature("W5")
@pytest.mark.parametrize(
    ("structure", "wanted"),
    [
        ({"regex": "[ab]{3}c"}, "[ab]{3}c"),
        ({"choice": ["red", "gr\u00fcn"]}, "red|gr\u00fcn"),
        ({"grammar": 'start: "x" "y"~2'}, "xyy"),
        ({"json": {"enum": [1, 2]}}, "1|2"),
    ],
)
def test_each_structure_of_vllm_is_served_beside_other_requests(
    server: Served, structure: dict[str, Any], wanted: str
) -> None:
    ruled = {"prompt": "a", "structured_outputs": structure, "max_tokens": 20, "n": 2}
    plain = {"prompt": "12 + 30 =", "temperature": 0, "max_tokens": 8}
    with ThreadPoolExecutor() as threads:
        ours, other = threads.map(lambda body: server.post(TEXT, body), (ruled, plain))
    assert all(re.fullmatch(wanted, choice["text"]) for choice in ours.json["choices"])
    assert other.json["choices"][0]["text"] == " 42."


@pytest.mark.feature("W5")
@pytest.mark.parametrize(
    ("guided", "wanted"),
    [
        ({"guided_regex": "[ab]{3}c"}, "[ab]{3}c"),
        ({"guided_choice": ["red", "gr\u00fcn"]}, "red|gr\u00fcn"),
        ({"guided_grammar": 'start: "x" "y"~2'}, "xyy"),
        ({"guided_json": {"enum": [1, 2]}}, "1|2"),
        ({"guided_json": '{"enum": [1, 2]}', "guided_json_object": False}, "1|2"),
        ({"guided_json": {"enum": [1]}, "response_format": {"type": "text"}}, "1"),
        ({"guided_regex": "a", "guided_decoding_backend": "auto"}, "a"),
    ],
)
def test_the_earlier_names_of_vllm_mean_the_same(
    server: Served, guided: dict[str, Any], wanted: str
) -> None:
    text = server.post(TEXT, {"prompt": "a", "max_tokens": 20, **guided}).json["choices"][0]["text"]
    assert re.fullmatch(wanted, text)
    (choice,) = server.post(CHAT, QUESTION | guided).json["choices"]
    assert re.fullmatch(wanted, choice["message"]["content"])


JSON = {"type": "json_object"}


@pytest.mark.parametrize(
    ("guided", "param", "text"),
    [
        ({"guided_regex": "a", "response_format": JSON}, "guided_regex", "exclude each other"),
        (
            {"guided_regex": "a", "guided_choice": ["a"]},
            "guided_regex",
            "guided_regex and guided_choice exclude each other; give one of them",
        ),
        (
            {"guided_json": {}, "structured_outputs": {"regex": "a"}},
            "guided_json",
            "guided_json and structured_outputs exclude each other",
        ),
        ({"guided_regex": "("}, "guided_regex", "guided_regex: this regex cannot be served"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "a rule refers to itself alone"),
        ({"guided_choice": []}, "guided_choice", "a list of 1 to 1024 texts"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "whitespace=on"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend", "--grammar"),
        (
            {"guided_regex": "a", "ignore_eos": True, "min_tokens": 2},
            "ignore_eos",
            "leave ignore_eos and min_tokens out",
        ),
    ],
)
def test_what_earlier_names_cannot_mean_is_refused_by_them(
    server: Served, guided: dict[str, Any], param: str, text: str
) -> None:
    answer = server.post(TEXT, {"prompt": "a", "max_tokens": 20, **guided})
    assert (answer.status, answer.error["param"]) == (400, param)
    assert text in answer.error["message"]


def test_any_object_is_json(server: Served) -> None:
    body = QUESTION | {"response_format": {"type": "json_object"}, "temperature": 0}
    (choice,) = server.post(CHAT, body).json["choices"]
    assert choice["message"]["content"].startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"not": {}}, 'Unimplemented keys: ["not"]'),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "zork"}, "zork"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(server: Served, schema: Any, text: str) -> None:
    answer = server.post(CHAT, QUESTION | {"response_format": schema_format(schema)})
    assert (answer.status, answer.error["param"]) == (400, "response_format")
    assert text in answer.error["message"]
    assert "response_format" in answer.error["message"]
    assert "structured_outputs" not in answer.error["message"]


@pytest.mark.feature("W5")
def test_bombs_are_refused_or_answered_and_others_are_served(server: Served) -> None:
    nested: dict[str, Any] = {"type": "integer"}
    for _ in range(63):
        nested = {"items": nested}
    structures = [
        {"json": nested},
        {"regex": "(" * 900 + "a" + ")" * 900},
        {"regex": "((a{1,1000}){1,1000}){1,1000}"},
        {"regex": "(x+x+)+y"},
        {"grammar": 'start: e\ne: e e | "a" | "aa" | "aaa"'},
        {"json": {"items": {"type": "string", "minLength": 10**6}}},
    ]
    plain = {"prompt": "12 + 30 =", "temperature": 0, "max_tokens": 8}
    bodies = [
        {"prompt": "a", "structured_outputs": structure, "max_tokens": 20}
        for structure in structures
    ]
    with ThreadPoolExecutor(3) as threads:
        bombs = [threads.submit(server.post, TEXT, body) for body in bodies]
        others = [server.post(TEXT, plain) for _ in range(4)]
        statuses = {bomb.result().status for bomb in bombs}
    assert statuses <= {200, 400}
    assert [each.json["choices"][0]["text"] for each in others] == [" 42."] * 4
    assert server.get("/health").status == 200
