"""Calls that models write with mistakes: which are calls, and which are text."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from headstock import registry
from headstock.spi import Tool, ToolEvent, ToolEventKind

PROPERTIES = {"a": {"type": "string"}, "b": {"type": "string"}, "n": {"type": "integer"}}
TOOLS = (
    Tool(name="f", parameters={"type": "object", "properties": PROPERTIES}),
    Tool(name="now", parameters={}),
)
Calls = list[tuple[str, object]]
OPEN = "no end"


def read(name: str, pieces: Sequence[str]) -> tuple[Calls, str]:
    """The calls, those without an end as (name, OPEN), and the content."""
    parser = registry.import_implementation(registry.load_spec("tools", name))(TOOLS)
    events: list[ToolEvent] = [event for piece in pieces for event in parser.feed(piece)]
    calls: Calls = []
    content = arguments = ""
    for event in [*events, *parser.finish()]:
        match event.kind:
            case ToolEventKind.CONTENT:
                content += event.text
            case ToolEventKind.CALL:
                calls.append((event.text, OPEN))
                arguments = ""
            case ToolEventKind.ARGUMENTS:
                arguments += event.text
            case ToolEventKind.END:
                calls[-1] = (calls[-1][0], json.loads(arguments))
    return calls, content


def tag(name: str, *members: str) -> str:
    return "\n".join([f"<tool_call>\n<function={name}>", *members, "</function>\n</tool_call>"])


A, N = "<parameter=a>\nx\n</parameter>", "<parameter=n>\n1\n</parameter>"
F_AN: Calls = [("f", {"a": "x", "n": 1})]
F_A: Calls = [("f", {"a": "x"})]
F_EMPTY: Calls = [("f", {})]
NOW: Calls = [("now", {})]
NESTED = "<function=g>\n<parameter=z>\n1\n</parameter>\n</function>"
F_JSON = '{"name": "f", "arguments": {"a": "x"}}'
NOW_JSON = '{"name": "now", "arguments": {}}'

CODER: list[tuple[str, Calls, str]] = [
    # closing tags are left out
    (tag("f", "<parameter=a>\nx", N), F_AN, ""),
    (tag("f", "<parameter=a>x<parameter=n>1"), F_AN, ""),
    (tag("f", A, "<parameter=n>\n1"), F_AN, ""),
    (tag("f", A, N).replace("</function>\n", ""), F_AN, ""),
    (tag("f", A, N).replace("\n</tool_call>", ""), F_AN, ""),
    (tag("f", "<parameter=a>\nx").replace("</function>\n", ""), F_A, ""),
    (tag("f", "<parameter=a>\nx").replace("\n</tool_call>", ""), F_A, ""),
    (tag("now").replace("</function>\n", ""), NOW, ""),
    ("<tool_call>\n<function=f>\n<parameter=a>\nx</function>\n</tool_call>", F_A, ""),
    ("<function=f>\n<parameter=a>\nx </function></tool_call> Done", [("f", {"a": "x "})], "Done"),
    ("<function=f>\n<parameter=a>\nx</tool_call>\n</tool_call>", F_A, ""),
    ("<function=f>\n<parameter=a>\nx</function>", [("f", OPEN)], ""),
    (
        tag("f", "<parameter=a>\n<tool_call>\n g</function>\n</tool_call>\n</parameter>"),
        [("f", {"a": "<tool_call>\n g</function>\n</tool_call>"})],
        "",
    ),
    # the next call begins before
    (f"<tool_call>\n<function=f>\n{A}\n{tag('now')}", F_A + NOW, ""),
    (f"<tool_call>\n<function=f>\n<parameter=a>\nx\n{tag('now')}", F_A + NOW, ""),
    (f"<function=f>\n<parameter=a>\nx\n<function=f>\n{A}\n</function>", F_A * 2, ""),
    # arguments as JSON
    ('<function=f>{"a": "x"}</function>', F_A, ""),
    ('<tool_call>\n<function=f>\n{"a": "x"}\n</function>\n</tool_call>\nDone', F_A, "Done"),
    ("<function=f>{x}</function>", [], "<function=f>{x}</function>"),
    ('<function=f>{"a": "x"</function>\nDone', F_A, "Done"),
    # the end of a tag is left out
    (f"<tool_call>\n<function=f\n{A}\n</function>\n</tool_call>", F_A, ""),
    (f"<function=f\n{A}\n</function>", F_A, ""),
    (f"<function=other\n{A}", [], f"<function=other\n{A}"),
    # tags twice, and where none is due
    (f"<tool_call>\n{tag('f', A)}", F_A, ""),
    (f"{tag('f', A)}\n</tool_call>", F_A, ""),
    (tag("f", A, "</parameter>", N), F_AN, ""),
    (tag("f", "<parameter=a>\nx</parameter>\n</parameter>"), F_A, ""),
    (f"<function=f>\n{A}\n</tool_call>\n</function>\nDone", F_A, "Done"),
    ("Use </function> or </tool_call>.", [], "Use </function> or </tool_call>."),
    # blanks, line breaks and quotes within tags
    ("<function= f >\n<parameter= a >\nx\n</parameter >\n</function\n>", F_A, ""),
    ('<function="f">\n<parameter="a">\nx\n</parameter></function>', F_A, ""),
    ("<function=f\n><parameter=a\nx\n</parameter></function>", F_A, ""),
    # text between tags is text once the call is over
    (tag("f", A, "And now:", N), F_AN, "And now:"),
    (tag("f", "With these:", A), F_A, "With these:"),
    (f"Before.\n{tag('f', A, 'Between.')}\nAfter.", F_A, "Before.Between.After."),
    # tags within values
    (tag("f", f"<parameter=a>\n{NESTED}\n</parameter>"), [("f", {"a": NESTED})], ""),
    (
        tag("f", "<parameter=a>\nend with </parameter> or </function>\n</parameter>", N),
        [("f", {"a": "end with </parameter> or </function>", "n": 1})],
        "",
    ),
    (
        tag("f", "<parameter=a>\n<tool_call> and <function=f> and <parameter=b>\n</parameter>"),
        [("f", {"a": "<tool_call> and <function=f> and <parameter=b>"})],
        "",
    ),
    (
        tag("f", "<parameter=a>\n<div>\n<function=f>\n</div>\n</parameter>"),
        [("f", {"a": "<div>\n<function=f>\n</div>"})],
        "",
    ),
    # names twice and names that nothing offers
    (tag("f", A, A.replace("x", "y")), [("f", {"a": "y"})], ""),
    (tag("other", A), [("other", {"a": "x"})], ""),
    # text that quotes the format
    ("Write `<tool_call>`, then <function=...>.", [], "Write `<tool_call>`, then <function=...>."),
    ("<function=NAME><parameter=KEY> is it", [], "<function=NAME><parameter=KEY> is it"),
    ("<function=f> is how one begins", [], "<function=f> is how one begins"),
    # cut off
    (f"<function=f>\n{A}\n", [("f", OPEN)], ""),
    (f"<function=f>\n{A}\n<parameter=n>\n1\n", [("f", OPEN)], ""),
    ("<tool_call>\n<function=f>\n", [("f", OPEN)], ""),
    (f"<function=f>\n{A}\nWhy", [("f", OPEN)], "Why"),
    (f"<function=f>\n{A}\n{'Why? ' * 50}", [("f", OPEN)], ("Why? " * 50)),
]
HERMES: list[tuple[str, Calls, str]] = [
    (f"<tool_call>\n{F_JSON}\n{NOW_JSON}\n</tool_call>", F_A + NOW, ""),
    (f"<tool_call>[{F_JSON}, {NOW_JSON}]</tool_call> Done", F_A + NOW, "Done"),
    (f"<tool_call>{F_JSON}, {NOW_JSON}", F_A + NOW, ""),
    (f"<tool_call>{{{NOW_JSON}}}</tool_call>", NOW, ""),
    (f"<tool_call>\n<tool_call>\n{F_JSON}\n</tool_call>\n</tool_call>", F_A, ""),
    (f'<tool_call>{{"type": "function", "function": {F_JSON}}}</tool_call>', F_A, ""),
    (f'<tool_call>{{"function": {F_JSON}, "id": "1"}}</tool_call>', F_A, ""),
    ('<tool_call>{"thought": "so", "name": "now", "arguments": {}}</tool_call>', NOW, ""),
    # slips that leave no doubt
    (
        '<tool_call>{"name": "f", "arguments": {"a": "1\n\t2", "b": "\\d \\u12"}}</tool_call>',
        [("f", {"a": "1\n\t2", "b": "\\d \\u12"})],
        "",
    ),
    ('<tool_call>{"name": "f", "arguments": {"a": "x",},}</tool_call>', F_A, ""),
    (
        '<tool_call>{"name": "f", "arguments": {"a": "it\\\'s", "b": None, "n": True}}</tool_call>',
        [("f", {"a": "it's", "b": None, "n": True})],
        "",
    ),
    # brackets are left out
    ('<tool_call>\n{"name": "f", "arguments": {"a": "x"\n</tool_call>', F_A, ""),
    ('<tool_call>{"name": "f", "arguments": {"a": "x", "n": 1</tool_call> Done', F_AN, "Done"),
    ('<tool_call>{"name": "f", "arguments": {"a": "x",\n</tool_call >', F_A, ""),
    (
        '<tool_call>{"name": "f", "arguments": {"b": [{"c": [1, 2}}</tool_call>',
        [("f", {"b": [{"c": [1, 2]}]})],
        "",
    ),
    (
        '<tool_call>{"name": "f", "arguments": {"b": {"c": [true</tool_call><tool_call>'
        f"{NOW_JSON}",
        [("f", {"b": {"c": [True]}}), *NOW],
        "",
    ),
    # and one too many
    ('<tool_call>{"name": "f", "arguments": {"a": "x"]}}</tool_call>', F_A, ""),
    ('<tool_call>\n{"name": "f", "arguments": {"a": "x"]\n, "n": 1]}\n</tool_call>', F_AN, ""),
    ('<tool_call>{"name": "f", "arguments": {"a": "x"}]}</tool_call>', F_A, ""),
    # broken before the first value: no call
    *(
        (text, [], text)
        for text in (
            "<tool_call>{'name': 'now', 'arguments': {}}</tool_call>",
            '<tool_call>{"name": "f", "arguments": {\'a\': \'x\'}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": {"a": x}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            '<tool_call>{"name": "f", "arguments": {</tool_call>',
            '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
            '<tool_call>{"name": "f", "argments": {"a": "x"}}</tool_call>',
            '<tool_call>{"name": "no name", "arguments": {}}</tool_call>',
            f'<tool_call>{{"name": "{"f" * 200}", "arguments": {{}}}}</tool_call>',
        )
    ),
    # and behind it: what is certain stays a call without an end, the rest is text
    (
        '<tool_call>{"name": "f", "arguments": {"a": "x", y}}</tool_call>',
        [("f", OPEN)],
        ", y}}</tool_call>",
    ),
    (
        f'<tool_call>{{"name": "f", "arguments": {{"n": 1 2}}}}{F_JSON}',
        [("f", OPEN)],
        f"2}}}}{F_JSON}",
    ),
    (f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * 200}', [("f", OPEN)], "[" * 74),
    (
        '<tool_call>{"name": "f", "arguments": {"a": "x"]y}}</tool_call>',
        [("f", OPEN)],
        "]y}}</tool_call>",
    ),
    *(
        (f'<tool_call>{{"name": "f", "arguments": {arguments}{rest}', [("f", OPEN)], rest)
        for arguments, rest in (
            ('{"a": "x", "b":', "</tool_call>"),
            ('{"a": "x", "b"', "</tool_call>"),
            ('{"a": "x"', "</tool_ca"),
            ('{"a": "x"', "</tool_cal>"),
        )
    ),
    # brackets that belong to text
    (f"<tool_call>{F_JSON}</tool_call> }}, ]", F_A, "}, ]"),
    (f"<tool_call>{F_JSON}, which it is", F_A, ", which it is"),
]
LLAMA: list[tuple[str, Calls, str]] = [
    (f"[{F_JSON}, {NOW_JSON}]", F_A + NOW, ""),
    (f"[{F_JSON}", F_A, ""),
    (f"{F_JSON}\n{NOW_JSON}", F_A + NOW, ""),
    (f"<|python_tag|>[{F_JSON}; {NOW_JSON}] ok", F_A + NOW, "ok"),
    (f"<|python_tag|><|python_tag|>{F_JSON}", F_A, ""),
    ('{"name": "f", "parameters": "{\\"a\\": \\"x\\"}"}', F_A, ""),
    (f'{F_JSON} {{"b": 1}}', F_A, '{"b": 1}'),
    *(
        (text, [], text)
        for text in (
            f"I call: {F_JSON}",
            f"```json\n{F_JSON}\n```",
            '<function=f>{"a": "x"}</function>',
            '{"name": "f", "age": 3}',
            "{'name': 'f'}",
            "[1, 2]",
            "[]",
            '[{"name": "other"}]',
        )
    ),
]
MISTRAL: list[tuple[str, Calls, str]] = [
    (f"[TOOL_CALLS]{F_JSON}", F_A, ""),
    (f"[TOOL_CALLS] {F_JSON}, {NOW_JSON} Done", F_A + NOW, "Done"),
    (f"[TOOL_CALLS][{F_JSON}]\n[TOOL_CALLS]now[ARGS]{{}}", F_A + NOW, ""),
    ('[TOOL_CALLS] f [CALL_ID] c1 [ARGS] {"a": "x"}\nDone', F_A, "Done"),
    ('[TOOL_CALLS]f[ARGS]{"a": "x"}}, so', F_A, "}, so"),
    (f"[TOOL_CALLS][TOOL_CALLS][{F_JSON}]", F_A, ""),
    ('[TOOL_CALLS]\n[TOOL_CALLS]f[ARGS]{"a": "x"}', F_A, ""),
    ("[TOOL_CALLS][TOOL_CALLS] is it", [], "[TOOL_CALLS][TOOL_CALLS] is it"),
    *(
        (text, [], text)
        for text in (
            f"[{F_JSON}]",
            "[TOOL_CALLS]f[ARGS]{x}",
            f"[TOOL_CALLS]{'f' * 200}[ARGS]{{}}",
            "[TOOL_CALLS]f[CALL_ID]what a long id, and no arguments",
            "[TOOL_CALLS] is the mark.",
        )
    ),
]
EXAMPLES = [
    (name, *example)
    for name, examples in (
        ("qwen3_coder", CODER),
        ("hermes", HERMES),
        ("llama3_json", LLAMA),
        ("mistral", MISTRAL),
    )
    for example in examples
]


@pytest.mark.feature("W3")
@pytest.mark.parametrize(("name", "text", "calls", "content"), EXAMPLES, ids=str)
def test_an_imperfect_answer_is_read_as_far_as_it_leaves_no_doubt(
    name: str, text: str, calls: Calls, content: str
) -> None:
    for size in (len(text), 1, 3, 7):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert read(name, pieces) == (calls, content)
