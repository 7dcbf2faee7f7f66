"""One grammar for answers of a schema and calls of tools: its masks admit nothing else."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from call_masks import LOOKALIKES, MARKS, PARSERS, Model, allowed, draw, is_valid, make_models, read
from hypothesis import given, settings
from hypothesis import strategies as st
from json_schemas import draw_schema
from often import count_examples

from headstock.requests.closed_objects import close_tool
from headstock.spi import CompiledGrammar, GrammarKind, Tool
from headstock.structured_outputs import StructuredOutputsParams
from headstock.text.call_or_answer import CallForms, CallOrAnswerParser
from headstock_tool_parsers.hermes import HermesParser


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    return make_models(tmp_path_factory.mktemp("tokens"))


def compile_both(
    model: Model,
    schema: dict[str, Any],
    forms: CallForms,
    *,
    allows_several: bool = True,
) -> CompiledGrammar:
    """The grammar of an answer or calls."""
    calls: Any = forms.write_grammar(model.tokens, allows_several=allows_several)
    params = StructuredOutputsParams(json=schema, or_calls=calls)  # type: ignore[arg-type]
    assert params.kind is GrammarKind.JSON_OR_CALLS
    return model.engine.compile(params.kind, params.text)


def draw_lookalike(chance: random.Random, seed: int) -> dict[str, Any]:
    """A schema of an object, one of whose members looks like a call."""
    schema = draw_schema(seed)
    schema["properties"]["x"] = {"const": chance.choice(LOOKALIKES)}
    schema["required"] = [*schema.get("required", ()), "x"]
    return schema


@pytest.mark.feature("W3", "W5")
@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize("name", PARSERS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=count_examples(12))
def test_what_the_masks_admit_is_a_call_that_is_read_or_an_answer_of_the_schema(
    models: dict[str, Model], name: str, marks: str, seed: int
) -> None:
    model, chance, kind = models[marks], random.Random(seed), PARSERS[name]
    schema = draw_schema(seed)
    if name == "llama3_json" and "name" in schema["properties"]:
        return
    tools = [
        Tool(name=each, parameters=draw_schema(seed + 1 + at))
        for at, each in enumerate(("f", "f.g"))
    ]
    tools.append(close_tool(Tool(name="none", parameters={"properties": {}})))
    forms = CallForms(kind, tools, [])
    forms.check_apart(schema)
    grammar = compile_both(model, schema, forms)
    for first in ("{", chance.choice(forms.openings)):
        text = draw(model, grammar, chance, first)
        cut = chance.randrange(len(text) + 1)
        whole, cut_in_two = (
            read(CallOrAnswerParser(kind(tools), forms.signs), pieces)
            for pieces in ([text], [text[:cut], text[cut:]])
        )
        assert whole == cut_in_two
        content, calls = whole
        if not calls:
            assert content == text and is_valid(schema, json.loads(content)), text
        else:
            assert not content and text.startswith(forms.openings), text
            for called, arguments in calls:
                (tool,) = (each for each in tools if each.name == called)
                assert is_valid(tool.parameters, arguments), text


def test_schemas_of_answer_and_tools_keep_their_references_apart(models: dict[str, Model]) -> None:
    def tree(kind: str) -> dict[str, Any]:
        rest = {"next": {"$ref": "#"}, "leaf": {"$ref": "#/$defs/L"}}
        return {
            "type": "object",
            "properties": rest,
            "$defs": {"L": {"type": kind}},
            "additionalProperties": False,
        }

    model = models["plain text"]
    forms = CallForms(HermesParser, [Tool(name="f", parameters=tree("integer"))], [])
    grammar = compile_both(model, tree("boolean"), forms)
    before, after = forms.openings[0], "}\n</tool_call>"
    for text, is_taken in (
        ('{"next":{"leaf":true}}', True),
        ('{"next":{"leaf":1}}', False),
        (f'{before}{{"next":{{"leaf":1}}}}{after}', True),
        (f'{before}{{"next":{{"leaf":true}}}}{after}', False),
    ):
        matcher = grammar.start()
        ids = np.array(model.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        assert (matcher.advance(ids) == len(ids)) == is_taken, text


@pytest.mark.parametrize("wrong", [{"type": "no type"}, {"not": {}}, {"uniqueItems": True}])
def test_what_is_not_supported_is_refused_in_the_answer_and_in_arguments(
    models: dict[str, Model], wrong: dict[str, Any]
) -> None:
    model, right = models["plain text"], {"type": "object"}
    for schema, parameters in ((wrong, right), (right, {"properties": {"x": wrong}})):
        forms = CallForms(HermesParser, [Tool(name="f", parameters=parameters)], [])
        with pytest.raises(ValueError, match=r"no type|not|uniqueItems"):
            compile_both(model, schema, forms)


def test_one_call_at_most_ends_the_answer(models: dict[str, Model]) -> None:
    model = models["special tokens"]
    forms = CallForms(HermesParser, [Tool(name="f", parameters={"const": {}})], [])
    text = f"{forms.openings[0]}{{}}}}\n</tool_call>"
    ids = np.array(model.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
    for allows_several in (True, False):
        matcher = compile_both(model, {"const": 1}, forms, allows_several=allows_several).start()
        assert matcher.advance(ids) == len(ids)
        choices, may_end = allowed(matcher, model)
        assert may_end and bool(choices) == allows_several
