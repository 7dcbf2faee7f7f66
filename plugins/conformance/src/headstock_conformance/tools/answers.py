"""Test answers for a tool parser, and its events for them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from attrs import evolve, frozen

from headstock import registry
from headstock.spi import Tool, ToolEvent, ToolEventKind, ToolParser, ToolParserSpec

CONTENT, CALL, ARGUMENTS, END = ToolEventKind
TOOLS = (
    Tool(
        name="f",
        parameters={
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "t": {"type": "string"},
                "u": {"type": "string"},
            },
        },
    ),
    Tool(name="get_weather", parameters={}),
)
PLAIN = (
    "It rains.",
    " Two lines,\nand white space at both ends. \n",
    "Grüße: 天気 🌧 é",
    "a < b, c > d, [1], {x}, </b> and <tool",
    '```json\n{"a": 1}\n```',
    "f(a=1) is how one calls f.",
)
"""Answers without a call in any format."""

PROSE = "It rains in the north, and the wind blows from the west.\nSo it does all day. " * 250
AROUND = 'So: a < b, {x} and "é 🌧", [1].'
"""Text next to a call."""


def write_answers(t: str, u: str = "") -> tuple[str, ...]:
    """Answers with calls in formats that models have; most parsers read one or two of them."""
    arguments: dict[str, object] = {"a": 1, "t": t} | ({"u": u} if u else {})
    spelled = json.dumps(arguments, ensure_ascii=False)
    one = f'{{"name": "f", "arguments": {spelled}}}'
    several = f'[{one}, {{"name": "get_weather", "arguments": {{}}}}]'
    parameters = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
    )
    coder = f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"
    python = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return (
        f"<tool_call>\n{one}\n</tool_call>",
        f"Let me see.\n<tool_call>{one}</tool_call>\n<tool_call>{one}</tool_call>\nDone.",
        one.replace("arguments", "parameters"),
        f"<|python_tag|>{one}",
        f"Wait. [TOOL_CALLS]{several}",
        f"[TOOL_CALLS]{several}",
        f"[TOOL_CALLS]f[ARGS]{spelled}[TOOL_CALLS]get_weather[ARGS]{{}}",
        coder,
        f"I look.\n{coder}\n{coder}",
        f"<function_calls>{several}</function_calls>",
        f"[f({python}), get_weather()]",
        f"```json\n{one}\n```",
    )


CALLS = write_answers('x < y }]<" é')


@frozen
class FoundCall:
    """A call found by a parser, its arguments as text."""

    name: str
    arguments: str = ""
    has_end: bool = False


@frozen
class Found:
    """The result of a parser for an answer, or its beginning."""

    content: str = ""
    calls: tuple[FoundCall, ...] = ()

    def add(self, events: Iterable[ToolEvent]) -> Found:
        """The result with these events added."""
        content, calls = self.content, list(self.calls)
        for event in events:
            match event.kind:
                case ToolEventKind.CONTENT:
                    content += event.text
                case ToolEventKind.CALL:
                    calls.append(FoundCall(event.text))
                case ToolEventKind.ARGUMENTS if calls:
                    calls[-1] = evolve(calls[-1], arguments=calls[-1].arguments + event.text)
                case ToolEventKind.END if calls:
                    calls[-1] = evolve(calls[-1], has_end=True)
        return Found(content, tuple(calls))


@frozen
class Subject:
    """A parser's spec, and the test answers.

    answers: with calls, at least one in the parser's own format
    """

    spec: ToolParserSpec
    answers: Sequence[str]

    def make(self) -> ToolParser:
        """A parser as the engine makes it.   raises: PluginBroken"""
        parser: ToolParser = registry.make_part(self.spec, ToolParser, TOOLS)
        return parser

    def read(self, pieces: Iterable[str]) -> list[ToolEvent]:
        """The result of a new parser; consecutive texts of one kind are joined."""
        parser = self.make()
        joined: list[ToolEvent] = []
        for events in (*map(parser.feed, pieces), parser.finish()):
            for event in events:
                assert isinstance(event, ToolEvent), f"event: expected a ToolEvent, got {event!r}"
                last = joined[-1] if joined else None
                if last and last.kind is event.kind and event.kind in (CONTENT, ARGUMENTS):
                    joined[-1] = ToolEvent(event.kind, last.text + event.text)
                elif event.text or event.kind in (CALL, END):
                    joined.append(event)
        return joined

    def read_steps(self, pieces: Iterable[str]) -> Iterator[Found]:
        """The results of a new parser after each piece, and at the end of the answer."""
        parser, found = self.make(), Found()
        for piece in pieces:
            found = found.add(parser.feed(piece))
            yield found
        yield found.add(parser.finish())

    def find(self, text: str) -> Found:
        """The result of a new parser for an answer in one piece."""
        return Found().add(self.read([text]))

    def list_answers(self) -> list[str]:
        """Answers with calls, answers without, and answers with text that resembles a call."""
        torn = [answer.replace(":", ";", 1) for answer in self.answers]
        marks = [f"The mark {mark} is no call." for mark in self.spec.special_tokens]
        return list(dict.fromkeys((*self.answers, *PLAIN, *torn, *marks)))


def describe(events: Sequence[ToolEvent]) -> str:
    """Format events for errors."""
    return ", ".join(f"{event.kind.name} {event.text!r}" for event in events) or "nothing"


def load(text: str) -> object:
    """The value of JSON text; None if it is invalid."""
    try:
        return json.loads(text)
    except ValueError:
        return None
