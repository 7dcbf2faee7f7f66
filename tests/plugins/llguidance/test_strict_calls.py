"""Grammars of text or calls: all that the masks admit has calls that follow their schemas."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from call_masks import LOOKALIKES, MARKS, PARSERS, Model, allowed, draw, is_valid, make_models, read
from hypothesis import given, settings
from hypothesis import strategies as st
from json_schemas import draw_schema
from often import count_examples

from headstock.requests.answer_formats import refuse_strict
from headstock.spi import CompiledGrammar, GrammarKind, Tool, ToolParser
from headstock.structured_outputs import StructuredOutputsParams
from headstock.text.call_or_answer import CallForms
from headstock_tool_parsers.hermes import HermesParser
from headstock_tool_parsers.mistral import MistralParser
from headstock_tool_parsers.qwen3_coder import Qwen3CoderParser

TEXTS = (
    "",
    "Let me look. ",
    "A < b, c > d, [1], {x}\n\nGr\u00fc\u00dfe \U0001f327 ",
    "\n {",
    '```json\n{"a": 1}\n```',
    "<think>\nHm.\n</think>\n\n",
    "<tool_call",
    "[TOOL_CALLS",
    "<function=f>\n<parameter=x>\n1\n</parameter>\n</function>",
    '<|python_tag|>{"name": "f", "parameters": {}}',
    *LOOKALIKES,
)
"""What answers begin with, as far as the masks let them."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    return make_models(tmp_path_factory.mktemp("tokens"))


def compile_calls(
    model: Model, kind: type[ToolParser], tools: list[Tool], *, allows_several: bool = True
) -> tuple[CompiledGrammar, CallForms]:
    """The grammar of text or calls of these tools, and how those are written."""
    forms = CallForms(kind, tools, [])
    calls: Any = forms.write_text_grammar(
        model.tokens, allows_several=allows_several, refuse=refuse_strict
    )
    params = StructuredOutputsParams(text_or_calls=calls)
    assert params.kind is GrammarKind.TEXT_OR_CALLS
    return model.engine.compile(params.kind, params.text), forms


def spell(model: Model, text: str) -> list[int]:
    """The tokens of the text, none of which is a mark."""
    return [
        token
        for char in text
        for token in model.tokenizer.encode(char, add_special_tokens=False).ids
    ]


def encode(model: Model, text: str) -> list[int]:
    """The tokens of the text, with marks as tokens."""
    ids: list[int] = model.tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.feature("W3", "W5")
@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize("name", PARSERS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=count_examples(12))
def test_whatever_the_masks_admit_the_arguments_of_strict_calls_follow_their_schema(
    models: dict[str, Model], name: str, marks: str, seed: int
) -> None:
    model, chance, kind = models[marks], random.Random(seed), PARSERS[name]
    schemas: dict[str, Any] = {"f": draw_schema(seed), "f.g": draw_schema(seed + 1), "any": {}}
    tools = [Tool(name=each, parameters=schema) for each, schema in schemas.items()]
    grammar, forms = compile_calls(model, kind, tools)
    wrong = f"{chance.choice(forms.openings)}{{}}"
    for text in (
        *chance.sample(TEXTS, 3),
        chance.choice(TEXTS) + chance.choice(forms.openings),
        chance.choice(TEXTS) + wrong,
    ):
        begun = chance.choice((spell, encode))(model, text)
        answer = draw(model, grammar, chance, begun=begun)
        cut = chance.randrange(len(answer) + 1)
        whole, cut_in_two = (
            read(kind(tools), pieces) for pieces in ([answer], [answer[:cut], answer[cut:]])
        )
        assert whole == cut_in_two
        content, calls = whole
        assert content == answer if not calls else answer.startswith(content)
        for called, arguments in calls:
            assert isinstance(arguments, dict) and is_valid(schemas[called], arguments), answer


FORMS: dict[str, tuple[type[ToolParser], str, str]] = {
    "hermes": (HermesParser, '<tool_call>\n{"name": "f", "arguments": ', "}\n</tool_call>"),
    "mistral": (MistralParser, '[TOOL_CALLS][{"name": "f", "arguments": ', "}]"),
    "qwen3_coder": (
        Qwen3CoderParser,
        "<tool_call>\n<function=f>\n",
        "\n</function>\n</tool_call>",
    ),
}
SUM: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize("name", FORMS)
def test_text_comes_alone_and_before_a_call_as_models_write_it(
    models: dict[str, Model], name: str, marks: str
) -> None:
    model, (kind, before, after) = models[marks], FORMS[name]
    grammar, _ = compile_calls(model, kind, [Tool(name="f", parameters=SUM)])
    for text, is_admitted in (
        ("", True),
        ("\n\n", True),
        ("Let me see: a < b, {x} [1]\n", True),
        (f'{before}{{"a": 1, "b": 2}}{after}', True),
        (f'Let me see.\n\n{before}{{"a":1,"b":2}}{after}', True),
        (f'{before}{{"a": "1", "b": 2}}{after}', False),
        (f'{before}{{"a": 1}}{after}', False),
        (f'{before}{{"a":  1, "b": 2}}{after}', False),
        (f'{before.replace("f", "g")}{{"a": 1, "b": 2}}{after}', False),
        (f'{before}{{"a": 1, "b": 2}}{after} And so on', False),
    ):
        matcher = grammar.start()
        ids = np.array(encode(model, text), np.int32)
        is_whole = matcher.advance(ids) == len(ids) and allowed(matcher, model)[1]
        assert is_whole == is_admitted, text


@pytest.mark.parametrize("name", FORMS)
def test_calls_follow_each_other_where_several_may(models: dict[str, Model], name: str) -> None:
    model, (kind, *_) = models["special tokens"], FORMS[name]
    tools = [Tool(name=each, parameters=SUM) for each in ("f", "g")]
    (form, *_), (other, *_) = (kind(tools).write_call(tool.name) for tool in tools)
    arguments = '{"a": 1, "b": 2}'
    first, second = (f"{each.before}{arguments}{each.after}" for each in (form, other))
    for allows_several in (True, False):
        grammar, _ = compile_calls(model, kind, tools, allows_several=allows_several)
        for text, is_admitted in (
            (f"Hm. {form.begin}{second}{form.end}", True),
            (f"Hm. {form.begin}{first}{form.separator}{second}{form.end}", allows_several),
        ):
            matcher = grammar.start()
            ids = np.array(encode(model, text), np.int32)
            is_whole = matcher.advance(ids) == len(ids) and allowed(matcher, model)[1]
            assert is_whole == is_admitted, text
            if is_admitted:
                _, calls = read(kind(tools), [text])
                assert [arguments for _, arguments in calls] == [{"a": 1, "b": 2}] * len(calls)


def test_bare_calls_take_the_answers_that_begin_like_them(models: dict[str, Model]) -> None:
    model, kind = models["plain text"], PARSERS["llama3_json"]
    grammar, _ = compile_calls(model, kind, [Tool(name="f", parameters=SUM)])
    call = '{"name": "f", "parameters": {"a": 1, "b": 2}}'
    for text, is_admitted in (
        ("Let me see: {x} [1]", True),
        (call, True),
        (f"\n\n{call}; {call}", True),
        (f"Text, and then {call}", True),
        (call.replace("1", "true"), False),
        ("[1]", False),
        ('\n{"a": 1}', False),
        (f"<|python_tag|>{call}", False),
    ):
        matcher = grammar.start()
        ids = np.array(encode(model, text), np.int32)
        is_whole = matcher.advance(ids) == len(ids) and allowed(matcher, model)[1]
        assert is_whole == is_admitted, text
        if is_admitted:
            _, calls = read(kind([Tool(name="f", parameters=SUM)]), [text])
            assert len(calls) == (0 if text[0] in "LT" else text.count("name"))
            assert all(arguments == {"a": 1, "b": 2} for _, arguments in calls)


def test_a_schema_that_is_not_supported_is_refused_by_name(models: dict[str, Model]) -> None:
    tool = Tool(name="f", parameters=SUM | {"properties": {"a": {"not": {}}, "b": {}}})
    with pytest.raises(ValueError, match="not"):
        compile_calls(models["plain text"], HermesParser, [tool])
