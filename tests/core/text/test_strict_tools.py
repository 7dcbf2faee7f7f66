"""Strict tools of chats: the structure that they make of an answer, and how that is divided."""

from __future__ import annotations

import json
from typing import Any

import pytest
from attrs import evolve

from headstock import SamplingParams
from headstock.errors import PluginBroken, RequestError
from headstock.requests.answer_formats import AnswerFormats, refuse_strict
from headstock.selection.tool_parsers import SelectedToolParser
from headstock.spi import GrammarKind, SpiRange, Tool, ToolParserSpec, WrittenCall
from headstock.structured_outputs import ReasoningTokens, StructuredOutputsParams
from headstock.text.answer import AnswerDivider
from headstock.text.call_or_answer import CallForms
from headstock.text.completion import join_pieces
from headstock.text.conversation import Conversation
from headstock.text.tokenizer import Tokenizer
from headstock_tool_parsers.hermes import HermesParser
from headstock_tool_parsers.llama3_json import Llama3JsonParser
from headstock_tool_parsers.mistral import MistralParser

from .test_chat_answers import TALK, TEMPLATE, TOOLS, Make, parts, says
from .test_chat_structures import NamedTokens

SUM: dict[str, Any] = {
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
}
CLOSED = {"type": "object", **SUM, "additionalProperties": False}
STRICT = {"type": "function", "function": {"name": "sum", "parameters": SUM, "strict": True}}
CALL = '<tool_call>\n{"name": "sum", "arguments": {"a": 2}}\n</tool_call>'
PARAMS = SamplingParams(max_tokens=None)


def read_grammar(outputs: StructuredOutputsParams) -> dict[str, Any]:
    """The parts of a grammar of text or calls."""
    assert outputs.kind is GrammarKind.TEXT_OR_CALLS
    grammar: dict[str, Any] = json.loads(outputs.text)
    return grammar


@pytest.mark.feature("W3")
@pytest.mark.parametrize("pace", [1, 1000])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("So it is.", (None, "So it is.", [], "stop")),
        (f"So: {CALL}", (None, "So:", [(0, "sum", '{"a": 2}')], "tool_calls")),
        (f"<think>Hm.</think>{CALL}", ("Hm.", "", [(0, "sum", '{"a": 2}')], "tool_calls")),
    ],
)
def test_an_answer_beside_strict_tools_is_text_or_calls(
    scripted: Make, tokenizer: Tokenizer, pace: int, text: str, expected: tuple[Any, ...]
) -> None:
    llm, loop = scripted(script=says(tokenizer, text), pace=pace, max_seq_len=900)
    options: Any = {"tools": [*TOOLS, STRICT], "chat_template": TEMPLATE, "split_answers": True}
    (whole,) = llm.chat(TALK, PARAMS, **options)
    assert parts(whole.outputs[0]) == expected
    pieces = [piece.outputs[0] for piece in llm.stream_chat(TALK, PARAMS, **options)]
    assert parts(join_pieces(pieces)) == expected

    grammar = read_grammar(loop.seen[0].params.structured_outputs)
    # Arguments of a tool that is not strict are any object.
    assert [call[1]["json"] for call in grammar["calls"]] == [{"type": "object"}, CLOSED]
    assert grammar["mark"] == [{"text": "<tool_call>"}]
    assert grammar["without"] == ["<tool_call>"] and grammar["not_first"] == []
    assert grammar["separator"] == [{"text": "\n<tool_call>"}]


@pytest.mark.parametrize(
    "options",
    [
        {"tools": TOOLS},
        {"tools": [STRICT], "tool_choice": "none"},
        {
            "tools": [*TOOLS, STRICT],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "add"}}],
                },
            },
        },
    ],
)
def test_without_a_strict_tool_that_may_be_called_there_is_no_structure(
    scripted: Make, options: dict[str, Any]
) -> None:
    llm, loop = scripted()
    for splits in (True, False):
        llm.chat(
            TALK,
            SamplingParams(max_tokens=1),
            chat_template=TEMPLATE,
            split_answers=splits,
            **options,
        )
    assert [request.params.structured_outputs for request in loop.seen] == [None, None]


def test_a_strict_tool_without_a_schema_takes_no_arguments(scripted: Make) -> None:
    llm, loop = scripted()
    tools = [{"type": "function", "function": {"name": "now", "strict": True}}]
    llm.chat(TALK, SamplingParams(max_tokens=1), tools=tools, chat_template=TEMPLATE)
    grammar = read_grammar(loop.seen[0].params.structured_outputs)
    assert grammar["calls"][0][1]["json"] == {"type": "object", "additionalProperties": False}


def test_objects_stay_open_where_that_is_set(scripted: Make) -> None:
    llm, loop = scripted(open_objects=True)
    llm.chat(TALK, SamplingParams(max_tokens=1), tools=[STRICT], chat_template=TEMPLATE)
    grammar = read_grammar(loop.seen[0].params.structured_outputs)
    assert grammar["calls"][0][1]["json"] == {"type": "object", **SUM}


def test_one_call_at_most_has_no_separator(scripted: Make) -> None:
    llm, loop = scripted()
    params = SamplingParams(max_tokens=1)
    options: Any = {"parallel_tool_calls": False, "chat_template": TEMPLATE}
    llm.chat(TALK, params, tools=[STRICT], **options)
    assert read_grammar(loop.seen[0].params.structured_outputs)["separator"] is None


@pytest.mark.feature("W4")
def test_reasoning_has_no_calls_that_no_grammar_rules(tokenizer: Tokenizer) -> None:
    formats = AnswerFormats()
    talk = Conversation(messages=TALK, tools=[STRICT])  # type: ignore[arg-type]
    tools = [Tool(name="sum", parameters=SUM)]
    ids = {"<think>": 1, "</think>": 2, "<tool_call>": 3}
    text = f"Hm.\n{CALL}\n</think>So: {CALL}"
    for known, reasoned, has_reasoned_call in (
        (ids, ReasoningTokens(end=2, without=(3,)), False),
        ({"<think>": 1, "</think>": 2}, ReasoningTokens(end=2), False),
        # Text that the grammar rules may have marks of reasoning, and calls behind them.
        ({"<tool_call>": 3}, None, True),
    ):
        outputs = formats.rule_calls(talk, TEMPLATE, NamedTemplate(known, tokenizer), tools)
        answer = formats.make_format(talk, TEMPLATE, "<think>", tokenizer)
        assert answer is not None
        delayed, answer = formats.delay_structure(outputs, answer, NamedTokens(known))
        assert delayed == evolve(outputs, after_reasoning=reasoned)
        divider = AnswerDivider(answer)
        divided = divider.add_text(text, is_last=True)
        assert divided.reasoning == ("Hm." if has_reasoned_call else f"Hm.\n{CALL}")
        assert divider.num_calls == (2 if has_reasoned_call else 1)


class NamedTemplate(NamedTokens):
    """Knows a few tokens, and renders templates as another tokenizer does."""

    def __init__(self, ids: dict[str, int], renderer: Tokenizer) -> None:
        super().__init__(ids)
        self.renderer = renderer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.renderer, name)


@pytest.mark.parametrize(
    ("kind", "tokens", "expected"),
    [
        (
            HermesParser,
            {"<tool_call>": 3, "</tool_call>": 4},
            {
                "mark": [{"token": 3}],
                "begin": [],
                "separator": [{"text": "\n"}, {"token": 3}],
                "end": [],
            },
        ),
        (
            MistralParser,
            {"[TOOL_CALLS]": 3},
            {
                "mark": [{"token": 3}],
                "begin": [{"text": "["}],
                "separator": [{"text": ", "}],
                "end": [{"text": "]"}],
            },
        ),
        (
            Llama3JsonParser,
            {},
            {"mark": [], "begin": [], "separator": [{"text": "; "}], "not_first": ["{", "["]},
        ),
    ],
)
def test_the_mark_stands_between_text_and_calls(
    kind: Any, tokens: dict[str, int], expected: dict[str, Any]
) -> None:
    forms = CallForms(kind, [Tool(name="sum", parameters=SUM)], [])
    grammar = forms.write_text_grammar(
        tokens, allows_several=True, refuse=refuse_strict, without=["<think>"]
    )
    assert {name: grammar[name] for name in expected} == expected
    assert grammar["without"] == [*kind.call_marks, "<think>"]


class Silent(HermesParser):
    def write_call(self, name: str) -> list[WrittenCall]:
        return []


class Unmarked(HermesParser):
    call_marks = ()


class OtherMark(HermesParser):
    call_marks = ("[TOOL_CALLS]",)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Silent, "the tool parser does not say how calls are written"),
        (Unmarked, "the tool parser does not say what tells calls from text"),
        (OtherMark, "the tool parser does not say what tells calls from text"),
    ],
)
def test_a_parser_whose_calls_cannot_be_ruled_refuses_strict_tools(kind: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=f"tools: strict .* here: {reason}; leave strict out"):
        CallForms(kind, [Tool(name="sum", parameters=SUM)], [], refuse_strict).write_text_grammar(
            {}, allows_several=True, refuse=refuse_strict
        )


class WrongMarks(HermesParser):
    call_marks = ("",)


def test_marks_are_texts() -> None:
    spec = ToolParserSpec(
        name="x", spi=SpiRange(0, 3), summary="", implementation=f"{__name__}:WrongMarks"
    )
    with pytest.raises(PluginBroken, match="x: call_marks: expected a tuple of texts"):
        SelectedToolParser(spec, "x").make([])


CALLS: dict[str, Any] = {
    **{key: [] for key in ("calls", "begin", "end", "mark", "without", "not_first")},
    "separator": None,
}


@pytest.mark.parametrize("wrong", ["{", {}, CALLS | {"more": 1}, CALLS | {"calls": [[5]]}])
def test_text_or_calls_that_no_chat_makes_are_refused(wrong: Any) -> None:
    with pytest.raises(RequestError, match="structured_outputs: text_or_calls: expected"):
        StructuredOutputsParams(text_or_calls=wrong)
    calls: Any = CALLS
    outputs = StructuredOutputsParams(text_or_calls=calls)
    assert StructuredOutputsParams(**outputs.as_dict()) == outputs  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="expected exactly one"):
        StructuredOutputsParams(json_object=True, text_or_calls=calls)


def test_schemas_of_strict_tools_have_limits(scripted: Make) -> None:
    llm, _ = scripted(max_seq_len=1_000_000)
    wide = {"properties": {f"p{number}": {"type": "integer"} for number in range(9000)}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": wide, "strict": True}}]
    with pytest.raises(RequestError, match=r"the grammar of strict tools has .* bytes; at most"):
        llm.chat(TALK, SamplingParams(max_tokens=1), tools=tools, chat_template=TEMPLATE)
