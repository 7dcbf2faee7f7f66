"""Structured outputs of chats: when it begins, and how calls in one are read."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from headstock import SamplingParams
from headstock.errors import RequestError
from headstock.requests.answer_formats import AnswerFormats
from headstock.spi import ToolEventKind
from headstock.structured_outputs import ReasoningTokens, StructuredOutputsParams
from headstock.text.conversation import Conversation
from headstock.text.forced_call import ForcedCallParser, make_call_schema
from headstock.text.tokenizer import Tokenizer
from headstock.text.tools import list_tools

from .test_chat_answers import SUB, TALK, TEMPLATE, TOOLS, Make


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


def test_a_structure_beside_tools_that_may_be_called_is_refused(scripted: Make) -> None:
    llm, loop = scripted()
    params = SamplingParams(max_tokens=1, structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r'cannot be combined with tools .* tool_choice "none"'):
        llm.chat(TALK, params, tools=TOOLS, chat_template=TEMPLATE)
    llm.chat(TALK, params, tools=TOOLS, tool_choice="none", chat_template=TEMPLATE)
    assert loop.seen[0].params.structured_outputs == params.structured_outputs


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
