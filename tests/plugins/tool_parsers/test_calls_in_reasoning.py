"""Calls in reasoning that a model does not close, as docs/serving.md has them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from often import count_examples

from headstock.errors import PluginBroken
from headstock.selection.tool_parsers import select_tool_parser
from headstock.spi import Tool, ToolEvent, ToolEventKind, ToolParser
from headstock.text import reasoning_calls
from headstock.text.answer import AnswerDivider, AnswerFormat, DividedText, join_calls
from headstock.text.reasoning import MARKS, ReasoningState
from headstock_tool_parsers.hermes import HermesParser

START, INSIDE, AFTER = ReasoningState
TOOLS = (
    Tool(name="now", parameters={}),
    Tool(name="get", parameters={"properties": {"city": {"type": "string"}}}),
)
NAMES = frozenset(tool.name for tool in TOOLS)
NOW = '{"name": "now", "arguments": {}}'
HERMES = f"<tool_call>\n{NOW}\n</tool_call>"
CODER = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
Parts = tuple[str, str, list[tuple[str, str]]]
CALLED = [("now", "{}")]


def make_divider(
    parser: str, marks: str = "think", state: ReasoningState = INSIDE
) -> AnswerDivider:
    selected = select_tool_parser(parser)
    made = AnswerFormat(
        reasoning=MARKS[marks],
        first_state=state,
        make_parser=lambda: selected.make(TOOLS),
        parser_label=parser,
        tool_names=NAMES,
    )
    return AnswerDivider(made)


def divide(divider: AnswerDivider, pieces: list[str]) -> Parts:
    """The reasoning, the content, and the name and arguments of each call."""
    parts = [divider.add_text(piece, is_last=False) for piece in pieces]
    parts.append(divider.add_text("", is_last=True))
    calls = join_calls([call for part in parts for call in part.tool_calls])
    return (
        "".join(part.reasoning for part in parts),
        "".join(part.content for part in parts),
        [(call.name, call.arguments) for call in calls],
    )


@pytest.mark.feature("W3", "W4")
@pytest.mark.parametrize(
    ("parser", "text", "parts"),
    [
        ("hermes", f"hm\n{HERMES}", ("hm", "", CALLED)),
        ("hermes", HERMES, ("", "", CALLED)),
        ("hermes", f"hm {HERMES}", ("hm ", "", CALLED)),
        ("hermes", f"hm\n\n{HERMES}\n{HERMES}", ("hm", "", CALLED * 2)),
        ("qwen3_coder", f"hm\n{CODER}", ("hm", "", CALLED)),
        ("mistral", "hm\n[TOOL_CALLS]now[ARGS]{}", ("hm", "", CALLED)),
        ("mistral", f"hm\n[TOOL_CALLS][{NOW}]", ("hm", "", CALLED)),
        ("llama3_json", f"hm\n<|python_tag|>{NOW}", ("hm", "", CALLED)),
        # what follows is the answer; the mark that comes late is no part of it
        ("hermes", f"hm\n{HERMES}\n</think>\n\nHi", ("hm", "Hi", CALLED)),
        ("hermes", f"hm\n{HERMES}\nHi\n", ("hm", "Hi\n", CALLED)),
        ("hermes", f"hm\n{HERMES}\nHi </thi", ("hm", "Hi </thi", CALLED)),
        ("hermes", f"a\n{HERMES}\nb\n</think>\nc</think>", ("a", "bc</think>", CALLED)),
        ("hermes", f"a\n{HERMES}\nb</th{HERMES}</think>c", ("a", "b</thc", CALLED * 2)),
        # text that a call may follow yet, or a mark
        ("hermes", "hm\n<tool_call>", ("hm\n<tool_call>", "", [])),
        ("hermes", 'hm\n<tool_call>\n{"name": "no', ('hm\n<tool_call>\n{"name": "no', "", [])),
        (
            "hermes",
            'hm\n<tool_call>\n{"name": "get", "arguments": {"city": "',
            ("hm", "", [("get", '{"city": "')]),
        ),
        ("hermes", "hm\n<tool_call>\n</think>\nHi", ("hm\n<tool_call>", "Hi", [])),
        # an opening may be written twice, and a second one counts where the first one does not
        ("hermes", f"hm\n<tool_call>\n{HERMES}", ("hm", "", CALLED)),
        ("hermes", f"hm\n<tool_call>\nso\n{HERMES}", ("hm\n<tool_call>\nso", "", CALLED)),
    ],
)
def test_an_opening_on_a_line_of_its_own_begins_a_call(
    parser: str, text: str, parts: Parts
) -> None:
    assert_divided(parser, text, parts)


@pytest.mark.feature("W3", "W4")
@pytest.mark.parametrize(
    ("parser", "thought"),
    [
        ("hermes", f"maybe <tool_call>{NOW}</tool_call>"),
        ("hermes", f"maybe\n<tool_call>{NOW}</tool_call>\nor not"),
        ("hermes", "I write `<tool_call>`\n, then JSON"),
        ("hermes", f"like `{HERMES}`"),
        ("hermes", f"so:\n```xml\n{HERMES}\n```\nor not"),
        ("hermes", f"so:\n  ~~~\n{HERMES}\n  ~~~"),
        ("hermes", '<tool_call>\n{"name": "function", "arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>'),
        ("hermes", "<tool_call>\nthe mark"),
        ("qwen3_coder", "<function=now>\n</function>"),
        ("qwen3_coder", f"like {CODER.replace(chr(10), '')}"),
        ("qwen3_coder", "<tool_call>\n<function=example_function_name>\n</function>\n</tool_call>"),
        ("qwen3_coder", HERMES),
        ("mistral", f"maybe [TOOL_CALLS][{NOW}]"),
        ("mistral", "`\n[TOOL_CALLS]` marks"),
        ("llama3_json", NOW),
        ("llama3_json", f"hm\n{NOW}"),
    ],
)
def test_what_only_looks_like_a_call_stays_reasoning(parser: str, thought: str) -> None:
    assert_divided(parser, thought, (thought, "", []))
    assert_divided(parser, f"{thought}\n</think>\n\nHi", (thought, "Hi", []))


def assert_divided(parser: str, text: str, parts: Parts) -> None:
    """Assert that an answer comes apart so, however it is cut and wherever it begins."""
    assert divide(make_divider(parser), [text]) == parts
    assert divide(make_divider(parser), list(text)) == parts
    for cut in range(1, len(text)):
        assert divide(make_divider(parser), [text[:cut], text[cut:]]) == parts
    assert divide(make_divider(parser, state=START), ["<think>", text]) == parts


def test_a_call_behind_reasoning_is_content_wherever_its_opening_stands() -> None:
    call = f"x <tool_call>{NOW}</tool_call>"
    assert divide(make_divider("hermes", state=AFTER), [call]) == ("", "x", CALLED)
    assert divide(make_divider("hermes"), [f"a</think>{call}"]) == ("a", "x", CALLED)
    # Where nothing has begun reasoning, an answer with a call is a plain one.
    plain = make_divider("hermes", "qwen3", START)
    assert divide(plain, [f"x\n{HERMES}"]) == ("", "x", CALLED)
    declared = make_divider("hermes", "think", START)
    assert divide(declared, [f"x\n{HERMES}"]) == ("", "x", CALLED)


def test_what_looks_like_a_call_is_held_back_no_longer_than_it_may_be_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(text: str) -> DividedText:
        return divider.add_text(text, is_last=False)

    divider = make_divider("hermes")
    assert read("hm\n<tool_call>\n") == DividedText("hm")
    assert read('{"name": "') == DividedText()
    rest = 'other", "arguments": {}'
    assert read(rest).reasoning == '\n<tool_call>\n{"name": "' + rest
    divider = make_divider("hermes")
    read("<tool_call>\n")
    (call,) = read(NOW).tool_calls
    assert (call.name, call.arguments) == ("now", "{}")
    # A parser may know of a call with its first argument alone, however long.
    long = json.dumps({"name": "get", "arguments": {"city": ["b" * 2000]}})
    text = f"<tool_call>\n{long}\n</tool_call>"
    assert divide(make_divider("hermes"), list(text))[2] == [
        ("get", json.dumps({"city": ["b" * 2000]}))
    ]
    monkeypatch.setattr(reasoning_calls, "MAX_UNDECIDED", 100)
    divider = make_divider("hermes")
    held = '<tool_call>\n{"a": "'
    assert read(held) == DividedText()
    assert read("b" * 1000).reasoning == held + "b" * 1000


SHREDS = (
    *("<tool_call>", "</tool_call>", "\n", "{", "}", '"', "name", ":", "now", "get", ",", " "),
    *("<function=", ">", "</function>", "<parameter=city>", "</parameter>", "x", "`", "```"),
    *("[TOOL_CALLS]", "[", "]", "[ARGS]", "<|python_tag|>", "<think>", "</think>", "</thi"),
    *(NOW, HERMES, CODER, "[TOOL_CALLS]now[ARGS]{}", f"\n<|python_tag|>{NOW}", f"\n{HERMES}\n"),
)


@given(
    st.sampled_from(["hermes", "qwen3_coder", "mistral", "llama3_json"]),
    st.sampled_from(["think", "qwen3"]),
    st.sampled_from(ReasoningState),
    st.lists(st.sampled_from(SHREDS), max_size=14),
    st.sets(st.integers(0, 200), max_size=8),
)
@settings(max_examples=count_examples(300))
def test_no_cut_changes_what_is_reasoning_content_or_a_call(
    parser: str, marks: str, state: ReasoningState, shreds: list[str], borders: set[int]
) -> None:
    text = "".join(shreds)
    cuts = sorted(each for each in borders if each <= len(text))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = divide(make_divider(parser, marks, state), [text])
    assert divide(make_divider(parser, marks, state), pieces) == whole
    assert divide(make_divider(parser, marks, state), list(text)) == whole
    if not whole[2]:
        # Nothing is lost but marks and the line breaks beside them.
        assert strip_marks(whole[0] + whole[1]) == strip_marks(text)


def strip_marks(text: str) -> str:
    """Text without white space and marks of reasoning."""
    return "".join(text.replace("<think>", "").replace("</think>", "").split())


class WrongOpenings(HermesParser):
    call_openings = ("",)


def test_a_parser_with_openings_that_are_no_texts_is_named() -> None:
    from attrs import evolve

    selected = select_tool_parser("hermes")
    spec = evolve(selected.spec, implementation=f"{__name__}:WrongOpenings")
    with pytest.raises(PluginBroken, match="call_openings: expected a tuple of texts"):
        evolve(selected, spec=spec).make(TOOLS)


def test_a_parser_that_fails_in_reasoning_is_named() -> None:
    class Failing(ToolParser):
        call_openings = ("<call>\n",)

        def feed(self, text: str) -> list[ToolEvent]:
            raise KeyError(json.dumps(text))

        def finish(self) -> list[ToolEvent]:
            return [ToolEvent(ToolEventKind.END)]

    made = AnswerFormat(
        reasoning=MARKS["think"], first_state=INSIDE, make_parser=Failing, parser_label="mine"
    )
    with pytest.raises(PluginBroken, match="mine failed: KeyError"):
        AnswerDivider(made).add_text("hm <call>\n", is_last=False)
