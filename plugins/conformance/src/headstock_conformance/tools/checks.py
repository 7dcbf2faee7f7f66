"""The cases of a tool parser: answers with calls and without, cut into pieces and cut short."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from headstock.errors import CannotRun, shorten
from headstock.spi import DeviceEnv, ToolEvent, ToolParserSpec
from headstock_conformance.case import Case
from headstock_conformance.tools.answers import (
    ARGUMENTS,
    AROUND,
    CALL,
    CALLS,
    CONTENT,
    END,
    PLAIN,
    PROSE,
    TOOLS,
    Subject,
    describe,
    load,
    write_answers,
)

MAX_HELD = 32
"""Maximum characters of text that a parser may hold back because they may begin a call."""


def list_cases(
    spec: ToolParserSpec,
    env: DeviceEnv,
    answers: Sequence[str] = CALLS,
    *,
    opt: Sequence[str] = (),
) -> tuple[Case, ...]:
    """All cases of a parser; independent of the machine. Parsers have no options.

    answers: with calls, if the parser's format is not in `CALLS`
    """
    checks: dict[str, Callable[[Subject], object]] = {
        "an answer without a call": check_plain,
        "calls of a known format": check_calls,
        "a call is begun once and ended once": check_order,
        "an answer in two pieces, cut anywhere": check_halves,
        "an answer in pieces of any size": check_pieces,
        "an answer that breaks off": check_broken_off,
        "text around calls": check_text_around,
        "text goes out as it comes": check_streamed_text,
        "arguments go out as they come": check_streamed_arguments,
        "two answers at once": check_two,
        "calls as it writes them": check_written,
        "no call without a mark": check_marks,
    }
    subject = Subject(spec, answers)
    return tuple(Case(name, partial(run, subject)) for name, run in checks.items())


def check_plain(subject: Subject) -> None:
    """All of it is content."""
    for text in PLAIN:
        events = subject.read([text])
        assert events == [ToolEvent(CONTENT, text)], (
            f"the answer {text!r} has no call, but is parsed as {describe(events)}"
        )
    assert subject.read([]) == [], "an empty answer has events"


def check_calls(subject: Subject) -> None:
    """Complete calls of offered tools have a JSON object of arguments."""
    num_calls = 0
    for text in subject.answers:
        for call in subject.find(text).calls:
            num_calls += 1
            assert call.name in {tool.name for tool in TOOLS}, (
                f"{text!r} calls {call.name!r}, which is not one of its tools"
            )
    for text in subject.list_answers():
        for call in subject.find(text).calls:
            assert not call.has_end or isinstance(load(call.arguments), dict), (
                f"{text!r} gives the arguments {call.arguments!r}; expected a JSON object"
            )
    if not num_calls:
        raise CannotRun(
            "it finds no call in the formats that the kit knows; pass answers with calls to "
            "headstock_conformance.tools.checks.list_cases"
        )


def check_written(subject: Subject) -> None:
    """Grammars make calls as `write_call` writes them.   raises: CannotRun"""
    forms = [(tool.name, form) for tool in TOOLS for form in subject.make().write_call(tool.name)]
    if not forms:
        raise CannotRun("write_call writes no calls")
    for name, form in forms:
        call = f"{form.before}{{}}{form.after}"
        for count in (1,) if form.separator is None else (1, 2):
            text = form.begin + (form.separator or "").join([call] * count) + form.end
            events = subject.read([text])
            expected = [ToolEvent(CALL, name), ToolEvent(ARGUMENTS, "{}"), ToolEvent(END)] * count
            assert events == expected, (
                f"write_call writes {text!r}, which is parsed as {describe(events)}"
            )


def check_marks(subject: Subject) -> None:
    """Grammars tell calls from text by `call_marks` and `call_starts`.   raises: CannotRun"""
    parser = subject.make()
    marks, starts = parser.call_marks, parser.call_starts
    if not marks:
        raise CannotRun("call_marks has no marks")
    for text in subject.list_answers():
        unmarked = text
        while mark := next((each for each in marks if each in unmarked), ""):
            unmarked = unmarked.replace(mark, "")
        if unmarked.lstrip().startswith(starts):
            unmarked = f"So: {unmarked}"
        events = subject.read([unmarked])
        assert all(event.kind is CONTENT for event in events), (
            f"the answer {unmarked!r} has none of {marks}, and is parsed as {describe(events)}"
        )


def check_order(subject: Subject) -> None:
    """CALL, ARGUMENTS and END come in this order."""
    for text in (*subject.answers, *PLAIN):
        assert_order(text, subject.read([text]), is_whole=True)


def check_halves(subject: Subject) -> None:
    """A stream may be cut after any token."""
    for text in subject.list_answers():
        whole = subject.read([text])
        for cut in range(len(text) + 1):
            assert_same(text, whole, subject.read([text[:cut], text[cut:]]), f"cut at {cut}")


def check_pieces(subject: Subject) -> None:
    """Pieces of one character, and of several."""
    for text in subject.list_answers():
        whole = subject.read([text])
        for size in (1, 2, 3, 7):
            pieces = [text[start : start + size] for start in range(0, len(text), size)]
            assert_same(text, whole, subject.read(pieces), f"in pieces of {size}")
            assert_same(text, whole, subject.read(["", *pieces, ""]), "with empty pieces")


def check_broken_off(subject: Subject) -> None:
    """A token limit may cut an answer anywhere."""
    for text in subject.answers:
        whole = subject.find(text)
        for length in range(len(text)):
            assert_order(text[:length], subject.read([text[:length]]), is_whole=False)
            for call, other in zip(subject.find(text[:length]).calls, whole.calls, strict=False):
                assert not call.has_end or call == other, (
                    f"{text[:length]!r} is cut off, but ends the call {call.name} with "
                    f"{call.arguments!r}, which is not all of it"
                )
                assert other.arguments.startswith(call.arguments), (
                    f"{text[:length]!r} has the arguments {call.arguments!r}, and the whole answer "
                    f"{other.arguments!r}"
                )


def check_text_around(subject: Subject) -> None:
    """Text outside calls is content: before, between and after them."""
    for text in subject.answers:
        for around in (f"{AROUND}\n{text}", f"{text}\n{AROUND}", f"{text}\n{AROUND}\n{text}"):
            content = subject.find(around).content
            assert AROUND in content, (
                f"{around!r} has the text {AROUND!r}, and the content is {content!r}"
            )


def check_streamed_text(subject: Subject) -> None:
    """Text is passed on as it arrives, whatever its length, also after a call."""
    for before in ("", *subject.answers):
        size = 1 if before else 5
        prose = PROSE[: len(PROSE) // 20] if before else PROSE
        pieces = [before, *(prose[at : at + size] for at in range(0, len(prose), size))]
        *steps, last = subject.read_steps(pieces)
        for index, found in enumerate(steps):
            num_missing = len(prose) - sum(map(len, pieces[1 : index + 1]))
            num_held = len(last.content) - len(found.content) - num_missing
            assert index == 0 or num_held <= MAX_HELD, (
                f"{num_held} characters of text that begins no call are held back; at most "
                f"{MAX_HELD} may be"
            )


def check_streamed_arguments(subject: Subject) -> None:
    """At most one value of a call's arguments is held back, whatever its length."""
    lengths = (1, 40, 2500)
    longer = [
        answer
        for length in lengths
        for answer in write_answers(*(" ".join([word] * length) for word in ("rain", "wind")))
    ]
    for text in (*subject.answers, *longer):
        calls = subject.find(text).calls
        values = [list_texts(call.arguments) for call in calls]
        starts = [[text.find(value) for value in each] for each in values]
        pieces = [text[at : at + 7] for at in range(0, len(text), 7)]
        for num_read, found in enumerate(subject.read_steps(pieces), start=1):
            for index, (each, begins) in enumerate(zip(values, starts, strict=True)):
                if len(calls) > 1 and text.count(each[0] if each else "") > 1:
                    continue  # equal texts in two calls do not show which call has begun
                begun = [value for value, at in zip(each, begins, strict=True) if at < num_read * 7]
                given = found.calls[index].arguments if index < len(found.calls) else ""
                missing = next((value for value in begun[:-1] if value not in given), None)
                assert missing is None, (
                    f"the value {shorten(missing)} of {len(missing or '')} characters is held "
                    "back when the next one has begun"
                )


def list_texts(arguments: str) -> list[str]:
    """Argument texts that appear unescaped and exactly once."""
    values = load(arguments)
    texts = (
        [each for each in values.values() if isinstance(each, str)]
        if isinstance(values, dict)
        else []
    )
    return [text for text in texts if len(text) > 3 and arguments.count(text) == 1]


def check_two(subject: Subject) -> None:
    """A process parses many answers at once."""
    for text in subject.answers:
        whole = subject.read([text])
        first, second = subject.make(), subject.make()
        first.feed(text[: len(text) // 2])
        events = [*second.feed(text), *second.finish()]
        kinds = [event.kind for event in events if event.kind in (CALL, END)]
        assert kinds == [event.kind for event in whole if event.kind in (CALL, END)], (
            "two parsers of a process interfere with each other"
        )


def assert_order(text: str, events: Sequence[ToolEvent], *, is_whole: bool) -> None:
    """Assert that the order of events is valid.

    is_whole: each call that begins must end, too
    """
    is_open = False
    for event in events:
        if event.kind is CALL:
            assert not is_open, f"{text!r}: a call begins before the last one ended"
            assert event.text, f"{text!r}: a call has no name"
            is_open = True
        elif event.kind is CONTENT:
            assert not is_open, f"{text!r}: content between a CALL and its END"
        else:
            assert is_open, f"{text!r}: {event.kind.name} outside of a call"
            is_open = is_open and event.kind is not END
    assert not (is_whole and is_open), f"{text!r}: a call has no END"


def assert_same(
    text: str, whole: Sequence[ToolEvent], events: Sequence[ToolEvent], how: str
) -> None:
    """Assert that pieces give the same result as the whole answer."""
    assert list(events) == list(whole), (
        f"{text!r} {how} is parsed as {describe(events)}, but in one piece as {describe(whole)}"
    )
