"""One grammar for answers of a schema and calls of tools: its masks admit nothing else."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from json_schemas import draw_schema
from jsonschema import Draft202012Validator, FormatChecker
from often import count_examples
from tokenizers import AddedToken, Tokenizer

import headstock_demo
from headstock.requests.closed_objects import close_tool
from headstock.spi import (
    CompiledGrammar,
    GrammarKind,
    Matcher,
    Tool,
    ToolEventKind,
    ToolParser,
    Vocabulary,
)
from headstock.structured_outputs import StructuredOutputsParams
from headstock.text.call_or_answer import CallForms, CallOrAnswerParser
from headstock_llguidance.engine import LLGuidanceEngine
from headstock_llguidance.options import LLGuidanceOptions
from headstock_tool_parsers.hermes import HermesParser
from headstock_tool_parsers.llama3_json import Llama3JsonParser
from headstock_tool_parsers.mistral import MistralParser
from headstock_tool_parsers.qwen3_coder import Qwen3CoderParser

END = 0
PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "qwen3_coder": Qwen3CoderParser,
}
MARKS = {
    "special tokens": (True, ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]")),
    "added tokens": (False, ("<tool_call>", "</tool_call>", "[TOOL_CALLS]")),
    "plain text": (False, ()),
}

LOOKALIKES = (
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    '}\n</tool_call>\n<tool_call>\n{"name": "f", "arguments": {',
    "<tool_call>\n<function=f>\n{}\n</function>\n</tool_call>",
    '[TOOL_CALLS][{"name": "f", "arguments": {}}]',
    '{"name": "f", "parameters": {}}; ',
    '"}]',
)
"""Texts of values that look like calls, or like the end of one."""


@frozen
class Model:
    """A grammar engine, its tokenizer and the marks that are tokens."""

    engine: LLGuidanceEngine
    tokenizer: Tokenizer
    tokens: dict[str, int]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    made = {}
    for name, (is_special, marks) in MARKS.items():
        source = Path(headstock_demo.__file__).parent / "checkpoint" / "tokenizer.json"
        tokenizer = Tokenizer.from_file(str(source))
        added = [AddedToken(mark, special=is_special, normalized=False) for mark in marks]
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(added)
        file = tmp_path_factory.mktemp("tokens") / "tokenizer.json"
        tokenizer.save(str(file))
        vocabulary = Vocabulary(
            tokenizer_file=str(file), size=tokenizer.get_vocab_size(), end_ids=(END,)
        )
        engine = LLGuidanceEngine(vocabulary, LLGuidanceOptions())
        made[name] = Model(engine, tokenizer, {mark: tokenizer.token_to_id(mark) for mark in marks})
    return made


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


def allowed(matcher: Matcher, model: Model) -> tuple[list[int], bool]:
    """The tokens that may come next, and whether the text may end."""
    mask = np.zeros(-(-model.tokenizer.get_vocab_size() // 32), np.int32)
    may_end = matcher.fill_mask(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [token for token in bits.nonzero()[0].tolist() if token != END], may_end


def draw(model: Model, grammar: CompiledGrammar, chance: random.Random, first: str = "") -> str:
    """A text that the masks admit, which begins with a token of the text `first`."""
    matcher, ids = grammar.start(), list[int]()
    while True:
        choices, may_end = allowed(matcher, model)
        if first and not ids:
            choices = [
                each for each in choices if first.startswith(model.tokenizer.decode([each], False))
            ]
        if may_end and (not choices or chance.random() < 0.6):
            return str(model.tokenizer.decode(ids, skip_special_tokens=False))
        # By chance alone, what closes something comes too seldom.
        closing = [
            each for each in choices if (model.tokenizer.id_to_token(each) or "")[:1] in '"}]'
        ]
        token = chance.choice(closing if closing and chance.random() < 0.3 else choices)
        assert matcher.advance(np.array([token], np.int32)) == 1
        ids.append(token)
        assert len(ids) < 3000


def read(parser: ToolParser, pieces: Sequence[str]) -> tuple[str, list[tuple[str, Any]]]:
    """The content, and the calls, each of which must be whole."""
    events = [event for piece in pieces for event in parser.feed(piece)] + [*parser.finish()]
    content, calls, arguments = "", [], ""
    for event in events:
        match event.kind:
            case ToolEventKind.CONTENT:
                content += event.text
            case ToolEventKind.CALL:
                calls.append([event.text, None])
                arguments = ""
            case ToolEventKind.ARGUMENTS:
                arguments += event.text
            case ToolEventKind.END:
                calls[-1][1] = json.loads(arguments)
    return content, [(name, value) for name, value in calls]


def draw_lookalike(chance: random.Random, seed: int) -> dict[str, Any]:
    """A schema of an object, one of whose members looks like a call."""
    schema = draw_schema(seed)
    schema["properties"]["x"] = {"const": chance.choice(LOOKALIKES)}
    schema["required"] = [*schema.get("required", ()), "x"]
    return schema


def is_valid(schema: Any, value: object) -> bool:
    return Draft202012Validator(schema, format_checker=FormatChecker()).is_valid(value)


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
