"""The cases of a tool parser: answers with calls and without, cut into pieces and broken off."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from attrs import frozen

from headstock import registry
from headstock.conformance.case import Case
from headstock.errors import CannotRun
from headstock.spi import DeviceEnv, Tool, ToolEvent, ToolEventKind, ToolParser, ToolParserSpec

CONTENT, CALL, ARGUMENTS, END = ToolEventKind
TOOLS = (
    Tool(
        name="f",
        parameters={
            "type": "object",
            "properties": {"a": {"type": "integer"}, "t": {"type": "string"}},
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

_OBJECT = '{"name": "f", "arguments": {"a": 1, "t": "}]<\\" é"}}'
_LIST = f'[{_OBJECT}, {{"name": "get_weather", "arguments": {{}}}}]'
_CODER = (
    "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=t>\nx < y\n"
    "</parameter>\n</function>\n</tool_call>"
)
CALLS = (
    f"<tool_call>\n{_OBJECT}\n</tool_call>",
    f"Let me see.\n<tool_call>{_OBJECT}</tool_call>\n<tool_call>{_OBJECT}</tool_call>\nDone.",
    _OBJECT.replace("arguments", "parameters"),
    f"<|python_tag|>{_OBJECT}",
    f"Wait. [TOOL_CALLS]{_LIST}",
    f"[TOOL_CALLS]{_LIST}",
    '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get_weather[ARGS]{}',
    _CODER,
    f"I look.\n{_CODER}\n{_CODER}",
    f"<function_calls>{_LIST}</function_calls>",
    '[f(a=1, t="x"), get_weather()]',
    f"```json\n{_OBJECT}\n```",
)
"""Answers with calls in formats that models have; most parsers read one or two of them."""


@frozen
class Subject:
    """A parser's spec, and the answers that are tried.

    answers: with calls, at least one in the parser's own format
    """

    spec: ToolParserSpec
    answers: Sequence[str]

    def make(self) -> ToolParser:
        """A parser as the engine makes it.   raises: PluginBroken"""
        parser: ToolParser = registry.make_part(self.spec, ToolParser, TOOLS)
        return parser

    def read(self, pieces: Iterable[str]) -> list[ToolEvent]:
        """What a new parser finds; texts of one kind that follow each other are joined."""
        parser = self.make()
        joined: list[ToolEvent] = []
        for events in (*map(parser.feed, pieces), parser.finish()):
            for event in events:
                assert isinstance(event, ToolEvent), f"an event is {event!r}, wanted a ToolEvent"
                last = joined[-1] if joined else None
                if last and last.kind is event.kind and event.kind in (CONTENT, ARGUMENTS):
                    joined[-1] = ToolEvent(event.kind, last.text + event.text)
                elif event.text or event.kind in (CALL, END):
                    joined.append(event)
        return joined

    def list_answers(self) -> list[str]:
        """Answers with calls, answers without, and answers with what looks like a call."""
        torn = [answer.replace(":", ";", 1) for answer in self.answers]
        marks = [f"The mark {mark} is no call." for mark in self.spec.special_tokens]
        return list(dict.fromkeys((*self.answers, *PLAIN, *torn, *marks)))


def list_cases(
    spec: ToolParserSpec,
    env: DeviceEnv,
    answers: Sequence[str] = CALLS,
    *,
    opt: Sequence[str] = (),
) -> tuple[Case, ...]:
    """All cases of a parser; the machine does not matter, and parsers take no options.

    answers: with calls, where the parser's format is none of those in `CALLS`
    """
    checks: dict[str, Callable[[Subject], object]] = {
        "an answer without a call": check_plain,
        "calls of a known format": check_calls,
        "a call is begun once and ended once": check_order,
        "an answer in two pieces, cut anywhere": check_halves,
        "an answer in pieces of any size": check_pieces,
        "an answer that breaks off": check_broken_off,
        "two answers at once": check_two,
    }
    subject = Subject(spec, answers)
    return tuple(Case(name, partial(run, subject)) for name, run in checks.items())


def check_plain(subject: Subject) -> None:
    """All of it is for the reader."""
    for text in PLAIN:
        events = subject.read([text])
        assert events == [ToolEvent(CONTENT, text)], (
            f"the answer {text!r} has no call, and comes as {describe(events)}"
        )
    assert subject.read([]) == [], "an empty answer has events"


def check_calls(subject: Subject) -> None:
    """Whole calls of tools that the request offers have an object of arguments."""
    num_calls = 0
    for text in subject.answers:
        for index, event in enumerate(events := subject.read([text])):
            if event.kind is not CALL:
                continue
            num_calls += 1
            arguments = events[index + 1].text if index + 1 < len(events) else ""
            assert event.text in {tool.name for tool in TOOLS}, (
                f"{text!r} calls {event.text!r}, which is none of its tools"
            )
            assert isinstance(load(arguments), dict), (
                f"{text!r} gives the arguments {arguments!r}, wanted a JSON object"
            )
    if not num_calls:
        raise CannotRun(
            "it finds no call in the formats that the kit knows; pass answers with calls to "
            "headstock.conformance.tools.checks.list_cases"
        )


def check_order(subject: Subject) -> None:
    """CALL, ARGUMENTS and END follow each other."""
    for text in (*subject.answers, *PLAIN):
        assert_order(text, subject.read([text]), is_whole=True)


def check_halves(subject: Subject) -> None:
    """A stream is cut where a token ends."""
    for text in subject.list_answers():
        whole = subject.read([text])
        for cut in range(len(text) + 1):
            assert_same(text, whole, subject.read([text[:cut], text[cut:]]), f"cut at {cut}")


def check_pieces(subject: Subject) -> None:
    """Of one character, and of some."""
    for text in subject.list_answers():
        whole = subject.read([text])
        for size in (1, 2, 3, 7):
            pieces = [text[start : start + size] for start in range(0, len(text), size)]
            assert_same(text, whole, subject.read(pieces), f"in pieces of {size}")
            assert_same(text, whole, subject.read(["", *pieces, ""]), "with empty pieces")


def check_broken_off(subject: Subject) -> None:
    """The limit of tokens ends an answer anywhere."""
    for text in subject.answers:
        for length in range(len(text)):
            assert_order(text[:length], subject.read([text[:length]]), is_whole=False)


def check_two(subject: Subject) -> None:
    """A process reads many answers at a time."""
    for text in subject.answers:
        whole = subject.read([text])
        first, second = subject.make(), subject.make()
        first.feed(text[: len(text) // 2])
        events = [*second.feed(text), *second.finish()]
        kinds = [event.kind for event in events if event.kind in (CALL, END)]
        assert kinds == [event.kind for event in whole if event.kind in (CALL, END)], (
            "two parsers of a process disturb each other"
        )


def assert_order(text: str, events: Sequence[ToolEvent], *, is_whole: bool) -> None:
    """Assert that events may follow each other so.

    is_whole: each call that begins must end, too
    """
    is_open = False
    for event in events:
        if event.kind is CALL:
            assert not is_open, f"{text!r}: a call begins before the last one ended"
            assert event.text, f"{text!r}: a call has no name"
            is_open = True
        elif event.kind is CONTENT:
            assert not is_open, f"{text!r}: content lies between a CALL and its END"
        else:
            assert is_open, f"{text!r}: {event.kind.name} comes outside of a call"
            is_open = is_open and event.kind is not END
    assert not (is_whole and is_open), f"{text!r}: a call has no END"


def assert_same(
    text: str, whole: Sequence[ToolEvent], events: Sequence[ToolEvent], how: str
) -> None:
    """Assert that pieces give what the whole answer gives."""
    assert list(events) == list(whole), (
        f"{text!r} {how} comes as {describe(events)}, and in one piece as {describe(whole)}"
    )


def describe(events: Sequence[ToolEvent]) -> str:
    """Events as errors show them."""
    return ", ".join(f"{event.kind.name} {event.text!r}" for event in events) or "nothing"


def load(text: str) -> object:
    """The value that JSON spells; None when it spells none."""
    try:
        return json.loads(text)
    except ValueError:
        return None
