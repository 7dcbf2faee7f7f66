"""Structured outputs of chats: when it begins, and how calls in one are read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from attrs import evolve

from headstock import SamplingParams
from headstock.errors import RequestError
from headstock.requests.answer_formats import AnswerFormats
from headstock.spi import GrammarKind, ToolEventKind, WrittenCall
from headstock.structured_outputs import ReasoningTokens, StructuredOutputsParams
from headstock.text.answer import AnswerDivider, AnswerFormat
from headstock.text.call_or_answer import CallForms, CallOrAnswerParser
from headstock.text.completion import join_pieces
from headstock.text.conversation import Conversation
from headstock.text.forced_call import ForcedCallParser, make_call_schema
from headstock.text.reasoning import ReasoningMarks
from headstock.text.tokenizer import Tokenizer
from headstock.text.tools import list_tools
from headstock_tool_parsers.hermes import HermesParser
from headstock_tool_parsers.llama3_json import Llama3JsonParser
from headstock_tool_parsers.mistral import MistralParser

from .test_chat_answers import SUB, TALK, TEMPLATE, TOOLS, Make, parts, says


@pytest.mark.parametrize(
    ("prompt", "reasoning"),
    [
        ("<think>", ReasoningTokens(end=2)),
        ("", ReasoningTokens(start=1, end=2)),
        ("<think></think>", None),
    ],
)
def test_a_structure_begins_after_reasoning(
    tokenizer: Tokenizer, prompt: str, reasoning: ReasoningTokens | None
) -> None:
    formats, structure = AnswerFormats(), StructuredOutputsParams(json_object=True)
    talk = Conversation(messages=TALK)
    answer = formats.make_format(talk, "{# </think> #}", prompt, tokenizer)
    assert answer is not None
    ids = {"<think>": 1, "</think>": 2}

    delayed, after = formats.delay_structure(structure, answer, NamedTokens(ids))
    assert delayed == evolve(structure, after_reasoning=reasoning) and after == answer

    # Without tokens for the marks it cannot be seen in time that reasoning has ended.
    at_once, undivided = formats.delay_structure(structure, answer, NamedTokens({}))
    assert at_once == structure
    assert reasoning is None or undivided.reasoning is None


class NamedTokens(Tokenizer):
    """A tokenizer that knows a few tokens by their texts."""

    def __init__(self, ids: dict[str, int]) -> None:
        self.ids = ids

    def find_ids(self, texts: Any) -> frozenset[int]:
        """The ids of those that it knows."""
        return frozenset(self.ids[text] for text in texts if text in self.ids)


SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
JSON_CALL = '{"name": "add", "arguments": {"a": 2}}'
CALLED = f"<tool_call>\n{JSON_CALL}\n</tool_call>"
ANSWERED = '{"sum": 5, "note": "<tool_call>"}'


@pytest.mark.feature("W3", "W5")
@pytest.mark.parametrize("pace", [1, 1000])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CALLED, (None, "", [(0, "add", '{"a": 2}')], "tool_calls")),
        (
            f"{CALLED}\n{CALLED}",
            (None, "", [(0, "add", '{"a": 2}'), (1, "add", '{"a": 2}')], "tool_calls"),
        ),
        (ANSWERED, (None, ANSWERED, [], "stop")),
        (CALLED[:30], (None, "", [(0, "add", "")], "stop")),
        ("<tool", (None, "<tool", [], "stop")),
    ],
)
def test_an_answer_beside_tools_is_calls_or_text(
    scripted: Make, tokenizer: Tokenizer, pace: int, text: str, expected: tuple[Any, ...]
) -> None:
    llm, loop = scripted(script=says(tokenizer, text), pace=pace, max_seq_len=900)
    params = SamplingParams(max_tokens=None, structured_outputs={"json": SCHEMA})  # type: ignore[arg-type]
    options: Any = {"tools": TOOLS, "chat_template": TEMPLATE, "split_answers": True}
    (whole,) = llm.chat(TALK, params, **options)
    assert parts(whole.outputs[0]) == expected
    pieces = [piece.outputs[0] for piece in llm.stream_chat(TALK, params, **options)]
    assert parts(join_pieces(pieces)) == expected

    outputs = loop.seen[0].params.structured_outputs
    assert outputs.kind is GrammarKind.JSON_OR_CALLS
    grammar = json.loads(outputs.text)
    assert grammar["json"] == SCHEMA | {"additionalProperties": False}
    assert grammar["calls"] == [
        [
            {"text": '<tool_call>\n{"name": "add", "arguments": '},
            {"json": {"type": "object"}},
            {"text": "}\n</tool_call>"},
        ]
    ]
    assert (grammar["begin"], grammar["separator"], grammar["end"]) == ([], [{"text": "\n"}], [])


@pytest.mark.feature("W4")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"<think>Hm.</think>{ANSWERED}", ("Hm.", ANSWERED, [])),
        (f"<think>Hm.</think>\n{CALLED}", ("Hm.", "", ["add"])),
        # The grammar begins behind the reasoning, and so do its calls.
        (f"<think>So:\n{CALLED}\n</think>{ANSWERED}", (f"So:\n{CALLED}", ANSWERED, [])),
        (CALLED, ("", "", ["add"])),
    ],
)
def test_reasoning_comes_before_either(text: str, expected: tuple[Any, ...]) -> None:
    tools = list_tools(TOOLS)
    forms = CallForms(HermesParser, tools, [])
    answer = AnswerFormat(
        reasoning=ReasoningMarks("<think>", "</think>"),
        make_parser=lambda: CallOrAnswerParser(HermesParser(tools), forms.signs),
        tool_names=frozenset({"add"}),
    )
    for size in (1, 7, len(text)):
        divider, divided = AnswerDivider(answer), []
        for start in range(0, len(text), size):
            is_last = start + size >= len(text)
            divided.append(divider.add_text(text[start : start + size], is_last=is_last))
        calls = [call.name for each in divided for call in each.tool_calls if call.id]
        reasoning = "".join(each.reasoning for each in divided)
        assert (reasoning, "".join(each.content for each in divided), calls) == expected
        assert divider.num_ended == len(calls)


def test_the_schema_of_a_tool_has_a_depth(scripted: Make) -> None:
    llm, _ = scripted(max_seq_len=50_000)
    params = SamplingParams(max_tokens=1, structured_outputs={"json": SCHEMA})  # type: ignore[arg-type]
    for depth in (64, 65, 200):
        deep: Any = {}
        for _ in range(depth):
            deep = {"items": deep}
        tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]
        if depth == 64:
            llm.chat(TALK, params, tools=tools, chat_template=TEMPLATE)
            continue
        with pytest.raises(RequestError, match="the schema of a tool is nested deeper than 64"):
            llm.chat(TALK, params, tools=tools, chat_template=TEMPLATE)


CALLS: dict[str, Any] = {"calls": [], "begin": [], "end": [], "separator": None}


@pytest.mark.parametrize(
    "wrong", ["{", "[]", "{}", {"calls": []}, 5, CALLS | {"calls": [[5]]}, CALLS | {"end": {1}}]
)
def test_calls_that_no_chat_makes_are_refused(wrong: Any) -> None:
    with pytest.raises(RequestError, match="structured_outputs: or_calls: expected"):
        StructuredOutputsParams(json={"type": "object"}, or_calls=wrong)  # type: ignore[arg-type]
    calls: Any = CALLS
    with pytest.raises(RequestError, match="expected json or json_object beside it"):
        StructuredOutputsParams(regex="a", or_calls=calls)


def test_one_call_at_most_has_no_separator(scripted: Make) -> None:
    llm, loop = scripted()
    params = SamplingParams(max_tokens=1, structured_outputs={"json_object": True})  # type: ignore[arg-type]
    llm.chat(TALK, params, tools=TOOLS, parallel_tool_calls=False, chat_template=TEMPLATE)
    grammar = json.loads(loop.seen[0].params.structured_outputs.text)
    assert grammar["separator"] is None and grammar["json"] == {"type": "object"}


@pytest.mark.parametrize(
    "structure", [{"regex": "a"}, {"choice": ["a"]}, {"grammar": "start: /a/"}]
)
def test_a_text_that_may_look_like_a_call_is_refused_beside_tools(
    scripted: Make, structure: dict[str, Any]
) -> None:
    llm, loop = scripted()
    params = SamplingParams(max_tokens=1, structured_outputs=structure)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r'only be combined .* JSON.* tool_choice "none"'):
        llm.chat(TALK, params, tools=TOOLS, chat_template=TEMPLATE)
    llm.chat(TALK, params, tools=TOOLS, tool_choice="none", chat_template=TEMPLATE)
    assert loop.seen[0].params.structured_outputs == params.structured_outputs


NAMED = {"properties": {"name": {}}, "additionalProperties": False}
UNNAMED = {"properties": {"sum": {}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "is_apart"),
    [
        (UNNAMED, True),
        ({"type": "array"}, True),
        ({"type": "string"}, True),
        ({"anyOf": [UNNAMED, {"type": "null"}]}, True),
        ({"$ref": "#/$defs/X", "$defs": {"X": UNNAMED}}, True),
        (False, True),
        (True, False),
        ({"type": "object"}, False),
        (NAMED, False),
        (UNNAMED | {"patternProperties": {"": {}}}, False),
        ({"oneOf": [UNNAMED, NAMED]}, False),
        ({"$ref": "#/$defs/X", "$defs": {"X": {"$ref": "#/$defs/X"}}}, False),
        ({"$ref": "#/other"}, False),
        ({"type": ["object", "null"], "properties": {}}, False),
    ],
    ids=json.dumps,
)
def test_calls_that_are_bare_json_need_a_schema_that_is_told_apart(
    schema: Any, is_apart: bool
) -> None:
    forms = CallForms(Llama3JsonParser, list_tools(TOOLS), [])
    if is_apart:
        forms.check_apart(schema)
    else:
        with pytest.raises(RequestError, match=r"may begin as a call does.* rename its property"):
            forms.check_apart(schema)
    # Marks are told apart from any JSON.
    CallForms(HermesParser, list_tools(TOOLS), []).check_apart(schema)
    CallForms(MistralParser, list_tools(TOOLS), []).check_apart(schema)


def test_a_space_that_a_tokenizer_writes_changes_nothing() -> None:
    tools = list_tools(TOOLS)
    forms = CallForms(MistralParser, tools, [])
    assert forms.signs == ("[T",) and CallForms(HermesParser, tools, []).signs == ("<",)
    bare = CallForms(Llama3JsonParser, tools, [])
    assert bare.signs == bare.openings
    text = ' [TOOL_CALLS] [{"name": "add", "arguments": {"a": 2}}]'
    for cut in range(len(text)):
        parser = CallOrAnswerParser(MistralParser(tools), forms.signs)
        events = [*parser.feed(text[:cut]), *parser.feed(text[cut:]), *parser.finish()]
        kinds = [event.kind for event in events if event.kind is not ToolEventKind.ARGUMENTS]
        assert kinds == [ToolEventKind.CALL, ToolEventKind.END]
    parser = CallOrAnswerParser(MistralParser(tools), forms.signs)
    answer = ' ["[TOOL_CALLS]"]'
    events = [event for char in answer for event in parser.feed(char)] + parser.finish()
    assert "".join(event.text for event in events) == answer
    assert {event.kind for event in events} == {ToolEventKind.CONTENT}


@pytest.mark.parametrize(
    ("sample", "opening"),
    [
        ('[TOOL_CALLS] [{"name": "find_weather", "arguments": {}}]', '[TOOL_CALLS][{"name": "add"'),
        ("[TOOL_CALLS]find_weather[ARGS]{}", "[TOOL_CALLS]add[ARGS]"),
        ("something else", '[TOOL_CALLS][{"name": "add"'),
    ],
)
def test_calls_are_written_as_the_template_writes_them(sample: str, opening: str) -> None:
    forms = CallForms(MistralParser, list_tools(TOOLS), ["", sample])
    assert forms.openings[0].startswith(opening)
    grammar = forms.write_grammar({"[TOOL_CALLS]": 5, "[ARGS]": 6}, allows_several=True)
    first, *rest = [*grammar["begin"], *grammar["calls"][0]]
    assert first == {"token": 5}
    assert ({"token": 6} in rest) == ("[ARGS]" in opening)


def test_a_parser_that_does_not_say_how_calls_are_written_is_named() -> None:
    class Silent(HermesParser):
        def write_call(self, name: str) -> list[WrittenCall]:
            return []

    with pytest.raises(RequestError, match="does not say how calls are written"):
        CallForms(Silent, list_tools(TOOLS), [])


@pytest.mark.parametrize(
    "written",
    [
        WrittenCall(before="<tool_call>", after="</tool_call>"),
        WrittenCall(before='{"name": "add", "arguments": ', after="}"),
        WrittenCall(before='So: <tool_call>{"name": "add", "arguments": ', after="}</tool_call>"),
        WrittenCall(before='<tool_call>{"name": "sub", "arguments": ', after="}</tool_call>"),
        WrittenCall(
            before='<tool_call>{"name": "add", "arguments": ',
            after="}</tool_call>",
            separator=" or ",
        ),
    ],
)
def test_a_parser_that_does_not_read_its_own_calls_is_broken(written: WrittenCall) -> None:
    class Broken(HermesParser):
        def write_call(self, name: str) -> list[WrittenCall]:
            return [written]

    with pytest.raises(ValueError, match="write_call: the parser does not read"):
        CallForms(Broken, list_tools(TOOLS), [])


@pytest.mark.parametrize("blank", ["", "\n  "])
def test_a_call_among_several_is_read_however_it_is_spaced(blank: str) -> None:
    arguments = '{"a":{"b":[1]}}'
    text = blank.join(["{", '"name"', ":", '"sub"', ",", '"parameters"', ":", arguments, "}"])
    tools = list_tools([*TOOLS, SUB])
    for cut in range(len(text) + 1):
        parser = ForcedCallParser(tools)
        events = [*parser.feed(text[:cut]), *parser.feed(text[cut:]), *parser.finish()]
        kinds = [event.kind for event in events if event.kind is not ToolEventKind.ARGUMENTS]
        assert kinds == [ToolEventKind.CALL, ToolEventKind.END]
        written = "".join(e.text for e in events if e.kind is ToolEventKind.ARGUMENTS)
        assert written == arguments, cut


def test_schemas_of_several_tools_are_resources_of_their_own() -> None:
    schema = {"$schema": "", "$id": "", "properties": {"next": {"$ref": "#"}}}
    tree = {"type": "function", "function": {"name": "tree", "parameters": schema}}
    calls = make_call_schema(list_tools([*TOOLS, tree]))["anyOf"]

    assert [each["properties"]["parameters"] for each in calls] == [
        {"type": "object", "$id": "urn:tool:add"},
        {"type": "object", "$id": "urn:tool:tree", "properties": schema["properties"]},
    ]
    assert make_call_schema(list_tools([tree])) == {"type": "object", **schema}
