"""An answer divided into reasoning, text for the reader and calls of tools, as it comes."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Sequence

from attrs import evolve, frozen

from headstock.errors import PLUGIN_FAILURES, PluginBroken, describe_error, format_count, shorten
from headstock.outputs import ToolCall
from headstock.spi import ToolEvent, ToolEventKind, ToolParser
from headstock.text.reasoning import ReasoningMarks, ReasoningSplitter, ReasoningState
from headstock.text.reasoning_calls import CallFinder

ID_LENGTH = 9
"""Characters of the id of a call: the chat templates of Mistral refuse any other length."""


@frozen(kw_only=True)
class AnswerFormat:
    """How answers to one conversation are divided.

    make_parser: makes the tool parser of one answer; None where no calls are looked for
    parser_label: what errors call it
    tool_names: which calls in reasoning count; None for those of any tool
    special_tokens: texts of special tokens that the answer's text must show
    allows_several: whether an answer may go on after a call
    finds_reasoned_calls: whether calls are looked for in reasoning that is not closed
    """

    reasoning: ReasoningMarks | None = None
    first_state: ReasoningState = ReasoningState.START
    make_parser: Callable[[], ToolParser] | None = None
    parser_label: str = ""
    tool_names: frozenset[str] | None = None
    special_tokens: tuple[str, ...] = ()
    allows_several: bool = True
    finds_reasoned_calls: bool = True


@frozen
class DividedText:
    """What a piece of an answer adds to each of its parts."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class AnswerDivider:
    """Divides one answer, whose text comes in pieces.

    num_ended: complete calls so far
    num_chars: characters of the text for the reader so far
    num_read: characters that the parser was given so far
    is_ended: the answer is over, though the model would write on
    """

    def __init__(self, answer_format: AnswerFormat) -> None:
        self.format = answer_format
        self.parser: ToolParser | None = None
        calls: CallFinder | None = None
        make_parser = answer_format.make_parser
        if make_parser is not None:
            self.parser = make_parser()
            if self.parser.call_openings and answer_format.finds_reasoned_calls:
                calls = CallFinder(self.parser.call_openings, make_parser, answer_format.tool_names)
        marks = answer_format.reasoning
        self.splitter = (
            None if marks is None else ReasoningSplitter(marks, answer_format.first_state, calls)
        )
        # Text after a call in reasoning may still have the closing mark, which is not content.
        self.late: ReasoningSplitter | None = None
        self.num_calls = self.num_ended = self.num_chars = self.num_read = 0
        self.is_in_call = self.is_ended = False

    def add_text(self, text: str, *, is_last: bool) -> DividedText:
        """What `text` makes certain; with `is_last`, the rest too.   raises: PluginBroken"""
        if self.parser is None:
            return DividedText(*self._split(text, is_last=is_last))
        try:
            reasoning, content = self._split(text, is_last=is_last)
            self.num_read += len(content)
            events = list(self.parser.feed(content)) if content else []
            if is_last:
                events += self.parser.finish()
            divided = self._collect(reasoning, events, is_last=is_last)
            if is_last and not self.num_calls and self.num_chars != self.num_read:
                raise ValueError(
                    f"an answer of {format_count(self.num_read, 'character')} has no call, and "
                    f"{self.num_chars} came back"
                )
            return divided
        except PLUGIN_FAILURES as error:  # whatever a stranger's parser raises
            raise PluginBroken(
                f"{self.format.parser_label} failed: {describe_error(error)}; report it there"
            ) from error

    def _split(self, text: str, *, is_last: bool) -> tuple[str, str]:
        """Reasoning and the rest."""
        if self.splitter is None:
            return "", text
        reasoning, content = self.splitter.feed(text)
        if is_last:
            more_reasoning, more_content = self.splitter.finish()
            reasoning, content = reasoning + more_reasoning, content + more_content
        if self.splitter.is_ended_by_call and self.late is None:
            self.late = ReasoningSplitter(self.splitter.marks, ReasoningState.INSIDE)
        return reasoning, content

    def _collect(
        self, reasoning: str, events: Sequence[ToolEvent], *, is_last: bool
    ) -> DividedText:
        """What the parser's events add.   raises: ValueError for events out of order"""
        contents: list[str] = []
        calls: list[ToolCall] = []
        for event in events:
            if self.is_ended:
                break
            match event.kind:
                case ToolEventKind.CONTENT:
                    self.is_in_call = False
                    contents.append(self._pass_content(event.text))
                case ToolEventKind.CALL:
                    self.is_in_call = True
                    contents.append(self._flush_content())
                    calls.append(
                        ToolCall(self.num_calls, make_call_id(), event.text, offset=self.num_chars)
                    )
                    self.num_calls += 1
                case ToolEventKind.ARGUMENTS | ToolEventKind.END if not self.is_in_call:
                    raise ValueError(f"a {event.kind.name} event outside a call")
                case ToolEventKind.ARGUMENTS:
                    calls.append(ToolCall(self.num_calls - 1, arguments=event.text))
                case ToolEventKind.END:
                    self.is_in_call = False
                    self.num_ended += 1
                    self.is_ended = not self.format.allows_several
                case unknown:
                    raise ValueError(f"a {shorten(unknown)} event")
        if is_last:
            contents.append(self._flush_content())
        return DividedText(reasoning, "".join(contents), join_calls(calls))

    def _pass_content(self, text: str) -> str:
        """What of the parser's content is certain, without a closing mark that comes late."""
        if self.late is not None:
            text = "".join(self.late.feed(text))
        self.num_chars += len(text)
        return text

    def _flush_content(self) -> str:
        """The content that was held back, as it may have been a mark."""
        text = self.late.take_held() if self.late is not None else ""
        self.num_chars += len(text)
        return text


def join_calls(pieces: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
    """The calls that `pieces` add up to, one of each index."""
    joined: dict[int, ToolCall] = {}
    for piece in pieces:
        before = joined.get(piece.index)
        joined[piece.index] = (
            piece
            if before is None
            else evolve(before, arguments=before.arguments + piece.arguments)
        )
    return tuple(joined.values())


def make_call_id() -> str:
    """A new id: letters and digits, unlike any other of a conversation."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(ID_LENGTH))
