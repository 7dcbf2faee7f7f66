"""Answers of the demo model beside strict tools: their calls follow the schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from chat_templates import HERMES_CALLS
from jsonschema import Draft202012Validator
from marked_checkpoint import write_marked_checkpoint
from often import often

from headstock import LLM, CompletionOutput, RequestError, SamplingParams

SUM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["m", "ft", None]},
    },
    "required": ["a", "unit"],
    "additionalProperties": False,
}
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"town": {"enum": ["Oslo", "Bergen"]}, "days": {"type": "boolean"}},
    "required": ["town"],
    "additionalProperties": False,
}
SCHEMAS = {"add": SUM, "find_weather": PLACE, "note": {"type": "object"}}
TEMPLATE = (
    "{{ tools | tojson if tools else '' }}{{ messages[-1].content }}{# </think> #}" + HERMES_CALLS
)
TALK = [{"role": "user", "content": "Once upon a time"}]


def make_tool(name: str, *, strict: bool) -> dict[str, Any]:
    """A tool of this name."""
    function = {"name": name, "parameters": SCHEMAS[name], "strict": strict}
    return {"type": "function", "function": function}


TOOLS = [make_tool("add", strict=True), make_tool("find_weather", strict=True)]
MIXED = [*TOOLS, make_tool("note", strict=False)]


@frozen
class Marked:
    """The model, and the ids of its marks."""

    llm: LLM
    ids: dict[str, int]

    def prefer(self, mark: str, weight: float, **others: Any) -> SamplingParams:
        """Parameters that like this mark."""
        bias = {self.ids[mark]: weight}
        return SamplingParams(**{"max_tokens": 120, "temperature": 1.0} | others, logit_bias=bias)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    folder = tmp_path_factory.mktemp("marked")
    return folder, write_marked_checkpoint(folder)


@pytest.fixture(scope="module", params=often(1, ["ngram", "off"]))
def marked(folder: tuple[Path, dict[str, int]], request: pytest.FixtureRequest) -> Iterator[Marked]:
    path, ids = folder
    settings: dict[str, Any] = {"num_pages": 512, "max_running_requests": 16}
    with LLM(str(path), chat_template=TEMPLATE, proposer=request.param, **settings) as llm:
        yield Marked(llm, ids)


def check_calls(output: CompletionOutput) -> int:
    """Assert that complete calls follow their schemas; the number of them."""
    calls = list(output.tool_calls)
    if output.finish_reason != "tool_calls":
        calls = calls[:-1]
    for call in calls:
        Draft202012Validator(SCHEMAS[call.name]).validate(json.loads(call.arguments))
    return len(calls)


@pytest.mark.feature("W3", "R4")
@pytest.mark.parametrize("tools", often(1, [MIXED, TOOLS]), ids=["mixed", "strict"])
def test_answers_are_text_and_calls_of_the_schemas(marked: Marked, tools: list[Any]) -> None:
    params = marked.prefer("<tool_call>", 9.0, n=6, seed=3)
    (answer,) = marked.llm.chat(TALK, params, tools=tools, split_answers=True)
    outputs = answer.outputs
    assert sum(map(check_calls, outputs)) > 0
    assert any(output.text and output.tool_calls for output in outputs)
    for output in outputs:
        # A call that is cut off before its first argument is text.
        assert output.finish_reason == "length" or "<tool_call>" not in output.text


@pytest.mark.feature("W3")
def test_a_stream_has_the_calls_of_the_whole_answer(marked: Marked) -> None:
    params = marked.prefer("<tool_call>", 100.0, temperature=0.0)
    options: dict[str, Any] = {"tools": TOOLS, "split_answers": True, "parallel_tool_calls": False}
    (whole,) = marked.llm.chat(TALK, params, **options)
    pieces = [piece.outputs[0] for piece in marked.llm.stream_chat(TALK, params, **options)]
    (call,) = whole.outputs[0].tool_calls
    assert whole.outputs[0].finish_reason == pieces[-1].finish_reason == "tool_calls"
    assert check_calls(whole.outputs[0]) == 1
    streamed = [each for piece in pieces for each in piece.tool_calls]
    assert "".join(each.name for each in streamed) == call.name
    assert "".join(each.arguments for each in streamed) == call.arguments


@pytest.mark.feature("W4")
def test_reasoning_comes_before_text_and_has_no_mark_of_calls(marked: Marked) -> None:
    bias = {marked.ids["</think>"]: 6.0, marked.ids["<tool_call>"]: 9.0}
    params = SamplingParams(max_tokens=80, temperature=1.0, n=6, seed=1, logit_bias=bias)
    (answer,) = marked.llm.chat(
        TALK, params, tools=TOOLS, split_answers=True, chat_template=f"{TEMPLATE}<think>"
    )
    assert any(output.reasoning and output.tool_calls for output in answer.outputs)
    for output in answer.outputs:
        check_calls(output)
        assert "<tool_call>" not in (output.reasoning or "")


@pytest.mark.full
def test_tools_that_are_not_strict_change_no_token(marked: Marked) -> None:
    params = marked.prefer("<tool_call>", 4.0, seed=5)
    tools = [make_tool(name, strict=False) for name in SCHEMAS]
    prompt = marked.llm.get_tokenizer().apply_chat_template(
        TALK, tools=tools, chat_template=TEMPLATE, tokenize=False
    )
    (plain,) = marked.llm.generate(prompt, params)
    (answer,) = marked.llm.chat(TALK, params, tools=tools)
    assert answer.outputs[0].token_ids == plain.outputs[0].token_ids


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ignore_eos": True}, "ignore_eos cannot be combined with strict tools"),
        ({"min_tokens": 3}, "min_tokens cannot be combined with strict tools"),
    ],
)
def test_what_contradicts_strict_tools_is_named(
    marked: Marked, change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        marked.llm.chat(TALK, SamplingParams(max_tokens=4, **change), tools=TOOLS)
    tools = [make_tool(name, strict=False) for name in SCHEMAS]
    marked.llm.chat(TALK, SamplingParams(max_tokens=4, **change), tools=tools)


def test_a_schema_that_cannot_be_followed_is_refused_unless_strict_is_left_out(
    marked: Marked,
) -> None:
    parameters = PLACE | {"properties": {"town": {"not": {"const": "Rome"}}}}
    function = {"name": "f", "parameters": parameters, "strict": True}
    params = SamplingParams(max_tokens=4)
    tools = [{"type": "function", "function": function}]
    with pytest.raises(RequestError, match=r"strict tools cannot be served by llguidance: .*not"):
        marked.llm.chat(TALK, params, tools=tools)
    marked.llm.chat(
        TALK, params, tools=[{"type": "function", "function": function | {"strict": False}}]
    )


def test_strict_tools_need_a_grammar_plugin(folder: tuple[Path, dict[str, int]]) -> None:
    with (
        LLM(str(folder[0]), chat_template=TEMPLATE, num_pages=64, grammar="off") as llm,
        pytest.raises(RequestError, match=r"strict tools cannot be served: grammar .* off"),
    ):
        llm.chat(TALK, SamplingParams(max_tokens=4), tools=TOOLS)
