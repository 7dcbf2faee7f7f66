"""Every tool parser: what it reads of answers, however they are cut into pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from often import count_examples

from headstock import registry
from headstock.spi import Tool, ToolEvent, ToolEventKind, ToolParserSpec

CONTENT, CALL, ARGUMENTS, END = ToolEventKind
NAMES = ("hermes", "llama3_json", "mistral", "qwen3_coder")
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "t": {"type": "string"},
        "n": {"type": ["string", "null"]},
        "o": {"anyOf": [{"type": "object"}, {"type": "array"}]},
        "b": {"type": "boolean"},
    },
}
TOOLS = (Tool(name="f", parameters=SCHEMA), Tool(name="get_weather", parameters={}))
SPECS: dict[str, ToolParserSpec] = {name: registry.load_spec("tools", name) for name in NAMES}


def read(name: str, pieces: Sequence[str]) -> list[tuple[str, str]]:
    """What a new parser finds in `pieces`; texts of one kind that follow each other are joined."""
    parser = registry.import_implementation(SPECS[name])(TOOLS)
    events: list[ToolEvent] = [event for piece in pieces for event in parser.feed(piece)]
    joined: list[tuple[str, str]] = []
    for event in [*events, *parser.finish()]:
        if event.kind in (CONTENT, ARGUMENTS):
            assert event.text
            if joined and joined[-1][0] == event.kind.value:
                joined[-1] = (event.kind.value, joined[-1][1] + event.text)
                continue
        joined.append((event.kind.value, event.text))
    return joined


def call(name: str, arguments: str) -> list[tuple[str, str]]:
    """The events of a whole call."""
    return [("call", name), ("arguments", arguments), ("end", "")]


def content(text: str) -> list[tuple[str, str]]:
    return [("content", text)]


HERMES_CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CODER_CALL = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
ANSWERS = {
    "hermes": [
        (HERMES_CALL, call("f", '{"a": 1}')),
        (HERMES_CALL.replace("}}", "}"), call("f", '{"a": 1}')),  # a bracket is missing
        (f"Let me see.\n{HERMES_CALL}", [*content("Let me see."), *call("f", '{"a": 1}')]),
        (f"{HERMES_CALL}\n{HERMES_CALL}\n", call("f", '{"a": 1}') * 2),
        (f"{HERMES_CALL}{HERMES_CALL}\nDone. ", [*call("f", '{"a": 1}') * 2, *content("Done. ")]),
        # the arguments first, no arguments, arguments as text, another tool than those offered
        (
            '<tool_call>{"arguments": {"t": "}<"}, "name": "f"}</tool_call>',
            call("f", '{"t": "}<"}'),
        ),
        ('<tool_call>{"name": "f"}</tool_call>', call("f", "{}")),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', call("f", "{}")),
        (r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>', call("f", '{"a": 1}')),
        ('<tool_call>{"name": "other", "arguments": {}}</tool_call>', call("other", "{}")),
        # a tag in a string, and no closing tag
        (
            '<tool_call>{"name": "f", "arguments": {"t": "</tool_call>\\""}}</tool_call>',
            call("f", '{"t": "</tool_call>\\""}'),
        ),
        (
            '<tool_call>{"name": "f", "arguments": {}} and so on',
            [*call("f", "{}"), *content("and so on")],
        ),
        # a bracket too many
        (
            f"{HERMES_CALL.replace('}}', '}}}')}\n{HERMES_CALL} {{}}",
            [*call("f", '{"a": 1}') * 2, *content("{}")],
        ),
        ('<tool_call>{"name": "f", "arguments": {}}\n}', call("f", "{}")),
        # no last bracket, or something else in its place
        ('<tool_call>{"arguments": {}, "name": "f"</tool_call>', call("f", "{}")),
        (
            r'<tool_call>{"name": "f", "arguments": "{}", </tool_call> Done.',
            [*call("f", "{}"), *content("Done.")],
        ),
        # no call: content, every character of it
        ("<tool_call>f(1)</tool_call>", content("<tool_call>f(1)</tool_call>")),
        ('<tool_call> {"arguments": {}} ', content('<tool_call> {"arguments": {}} ')),
        ("<tool_call>[]" + HERMES_CALL, [*content("<tool_call>[]"), *call("f", '{"a": 1}')]),
        ("a <tool_call b </tool_call>\n", content("a <tool_call b </tool_call>\n")),
        ('{"name": "f", "arguments": {}}', content('{"name": "f", "arguments": {}}')),
        ("", []),
        (" \n", content(" \n")),
        # broken off
        ('<tool_call>{"na', content('<tool_call>{"na')),
        ('<tool_call>{"name": "f", "arg', [("call", "f")]),
        (
            '<tool_call>{"name": "f", "arguments": {"a": ',
            [("call", "f"), ("arguments", '{"a": ')],
        ),
        (HERMES_CALL[:-5], call("f", '{"a": 1}')),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}', call("f", '{"a": 1}')),
    ],
    "llama3_json": [
        ('{"name": "f", "parameters": {"a": 1}}', call("f", '{"a": 1}')),
        (
            '\n<|python_tag|>{"type": "function", "name": "f", "parameters": {}}',
            call("f", "{}"),
        ),
        (
            '{"name": "f", "parameters": {}}; {"name": "get_weather", "arguments": {"a": 2}}',
            [*call("f", "{}"), *call("get_weather", '{"a": 2}')],
        ),
        ('I call: <|python_tag|>{"name": "f"}', [*content("I call:"), *call("f", "{}")]),
        (
            '{"name": "f", "parameters": {"a": 1}; {"name": "f"}',
            call("f", '{"a": 1}') + call("f", "{}"),
        ),
        ('{"name": "f", "parameters": {}}}; {"name": "f"}}', call("f", "{}") * 2),
        # what people ask for as JSON
        ('{"name": "Alice", "age": 3}', content('{"name": "Alice", "age": 3}')),
        (' {"a": [1, {"name": "f"}]}\n', content(' {"a": [1, {"name": "f"}]}\n')),
        ("<|python_tag|>print(1)", content("<|python_tag|>print(1)")),
        ('Well: {"name": "f"}', content('Well: {"name": "f"}')),
        ('{"name": "f"} and more', [*call("f", "{}"), *content("and more")]),
        ('{"name": "f", "parameters": [1]}', content('{"name": "f", "parameters": [1]}')),
        ('{"na', content('{"na')),
        ("  ", content("  ")),
    ],
    "mistral": [
        ('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', call("f", '{"a": 1}')),
        (
            '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"arguments": {"b": []}, "name": "g"}]',
            [*call("f", "{}"), *call("g", '{"b": []}')],
        ),
        ('Hm.\n[TOOL_CALLS]f[ARGS]{"a": "]"}', [*content("Hm."), *call("f", '{"a": "]"}')]),
        (
            '[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]get_weather[CALL_ID]abc[ARGS] {"a": 1}',
            [*call("f", "{}"), *call("get_weather", '{"a": 1}')],
        ),
        ('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}]', call("f", '{"a": 1}')),
        ('[TOOL_CALLS]f{"a": 1} ok', [*call("f", '{"a": 1}'), *content("ok")]),
        # no call
        ("[TOOL_CALLS]f or g", content("[TOOL_CALLS]f or g")),
        ("[TOOL_CALLS]f[ARGS]1", content("[TOOL_CALLS]f[ARGS]1")),
        ("[TOOL_CALLS]f[CALL_ID]x[AR", content("[TOOL_CALLS]f[CALL_ID]x[AR")),
        ("[TOOL_CALLS] [1]", content("[TOOL_CALLS] [1]")),
        ("[TOOL_CALLS]", content("[TOOL_CALLS]")),
        ("see [TOOL] [1] ", content("see [TOOL] [1] ")),
        ("[TOOL_CALLS]f[ARGS]{1", content("[TOOL_CALLS]f[ARGS]{1")),
        ('[TOOL_CALLS]f[ARGS]{"a', [("call", "f"), ("arguments", '{"a')]),
    ],
    "qwen3_coder": [
        (CODER_CALL, call("f", '{"a": 1}')),
        (CODER_CALL.removeprefix("<tool_call>\n"), call("f", '{"a": 1}')),
        (f"So:\n{CODER_CALL}\n{CODER_CALL}", [*content("So:"), *call("f", '{"a": 1}') * 2]),
        (
            "<tool_call><function=f><parameter=t>\n1\n\n</parameter><parameter=o>[1, 2]"
            "</parameter><parameter=b>True</parameter><parameter=x>7</parameter></function>",
            call("f", r'{"t": "1\n", "o": [1, 2], "b": true, "x": "7"}'),
        ),
        (
            "<function=f><parameter=n>null</parameter><parameter=a>one</parameter>"
            '<parameter=o>NaN</parameter></function></tool_call>"',
            [*call("f", '{"n": null, "a": "one", "o": "NaN"}'), *content('"')],
        ),
        ("<function=get_weather></function>", call("get_weather", "{}")),
        # no call
        ("<tool_call>f()</tool_call>", content("<tool_call>f()</tool_call>")),
        ("<tool_call>\n<function=>", content("<tool_call>\n<function=>")),
        ("<function=f", content("<function=f")),
        ("<function=f>\nno", content("<function=f>\nno")),
        ("<function=f><parameter=a>1</para", [("call", "f"), ("arguments", "{")]),
    ],
}
EXAMPLES = [(name, text, found) for name, pairs in ANSWERS.items() for text, found in pairs]


@pytest.mark.feature("W3")
@pytest.mark.parametrize(("name", "text", "found"), EXAMPLES, ids=str)
def test_an_answer_is_read_the_same_whole_cut_once_and_by_characters(
    name: str, text: str, found: list[tuple[str, str]]
) -> None:
    assert read(name, [text]) == found
    assert read(name, list(text)) == found
    for cut in range(1, len(text)):
        assert read(name, [text[:cut], "", text[cut:]]) == found


VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
WORDS = st.text(st.characters(exclude_characters="{[<|", exclude_categories=("Cs",)), max_size=12)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[str, list[tuple[str, str]]]:
    """Text with calls for `hermes`, and what is to be found."""
    text, found = "", []
    for words in draw(st.lists(WORDS, max_size=3)):
        arguments = json.dumps(draw(st.dictionaries(st.text(max_size=4), VALUES, max_size=3)))
        spelt = f'{{"name": "f", "arguments": {arguments}}}'
        text += f"{words}<tool_call>{spelt}</tool_call>"
        stripped = words.rstrip() if not found else words.strip()
        found += [*(content(stripped) if stripped else []), *call("f", arguments)]
    return text, found


@given(conversations(), st.data())
@settings(max_examples=60)
def test_random_calls_are_found_whole_and_cut(
    conversation: tuple[str, list[tuple[str, str]]], data: st.DataObject
) -> None:
    text, found = conversation
    assert read("hermes", [text]) == found
    assert read("hermes", cut(text, data)) == found


def cut(text: str, data: st.DataObject) -> list[str]:
    """Random pieces of the text."""
    borders = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *borders], [*borders, len(text)], strict=True)]


SHREDS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *('{"name": "f", ', '"arguments": ', '"parameters": ', '{"a": 1}', "{", "}", "[", "]", ","),
    *("<function=f>", "<parameter=a>", "</parameter>", "</function>", '"', "\\", "f", " ", "\n"),
    *("null", ";", "<", "tool", "1", ":"),
]


@pytest.mark.feature("W3")
@given(st.sampled_from(NAMES), st.lists(st.sampled_from(SHREDS), max_size=14), st.data())
@settings(max_examples=count_examples(300))
def test_whatever_a_model_writes_no_cut_changes_what_is_read_and_no_text_is_lost(
    name: str, shreds: list[str], data: st.DataObject
) -> None:
    text = "".join(shreds)
    whole = read(name, [text])
    assert read(name, list(text)) == whole == read(name, cut(text, data))
    kinds = [kind for kind, _ in whole]
    if "call" not in kinds:
        assert "".join(text for _, text in whole) == text
    for before, kind in zip(["content", *kinds], kinds, strict=False):
        assert kind in ("content", "call") or before in ("call", "arguments")


@pytest.mark.parametrize("name", NAMES)
def test_a_long_answer_without_an_end_takes_linear_time(name: str) -> None:
    # Thousands of marks, each of which might begin a call.
    mark = {"hermes": "<tool_call>", "llama3_json": "<|python_tag|>"}.get(name, "[TOOL_CALLS]")
    text = mark + '{"a": "' * 10_000
    assert read(name, [text[i : i + 5] for i in range(0, len(text), 5)]) == content(text)
