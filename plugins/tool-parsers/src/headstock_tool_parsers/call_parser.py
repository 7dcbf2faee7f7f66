"""Common base of the parsers: text around calls, and marks that may be cut anywhere."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Sequence

from headstock.spi import Tool, ToolEvent, ToolEventKind, ToolParser
from headstock_tool_parsers.call_reader import CallReader
from headstock_tool_parsers.json_reader import Reading

BLANK = " \t\r\n"
AFTER_CALL = re.compile(r"[\s,;}\]]*")
"""Characters allowed between two calls, or between a call and its closing mark."""


class CallParser(ToolParser):
    """A parser that is in one state at a time; a call begins with one of `marks`.

    A state consumes what is certain from the front of `buffer`. It returns True if the next state
    should read the rest, and False if more text is needed.

    closers: marks that may end a call
    opening: text consumed without an event; content, if it turns out not to be a call
    is_list: whether the call is in a list
    """

    marks: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    argument_keys: tuple[str, ...] = ("arguments", "parameters")

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.buffer = ""
        self.opening = ""
        self.events: list[ToolEvent] = []
        self.state: Callable[[], bool] = self.read_text
        self.next_marks: tuple[str, ...] = ()
        self.reader = CallReader()
        self.is_beside_call = self.is_list = False

    def feed(self, text: str) -> list[ToolEvent]:
        """The events that are certain after `text`."""
        self.buffer += text
        while self.buffer and self.state():
            pass
        return self._take_events()

    def finish(self) -> list[ToolEvent]:
        """The events of the text held back."""
        if self.state == self.read_call:
            if self.reader.end_early() or self.reader.break_off():
                self.opening = ""
            self.events += self.reader.take_events()
        if self.state == self.end_call:
            self.buffer = self.drop_gap()
        self.add_content(self.opening + self.buffer)
        self.opening = self.buffer = ""
        return self._take_events()

    def _take_events(self) -> list[ToolEvent]:
        events, self.events = self.events, []
        return events

    @property
    def names(self) -> frozenset[str] | None:
        """The names that a call may have; None for any."""
        return None

    # states

    def read_text(self) -> bool:
        """Text outside calls, up to a mark."""
        start, mark = find_first(self.buffer, self.marks)
        if mark:
            before = self.buffer[:start].rstrip()
            self.add_content(before)
            self.buffer = self.buffer[len(before) :]
            # White space before a call is dropped with the mark, and kept if there is none.
            self.take(start - len(before) + len(mark))
            self.is_list = False
            return self.go_to(self.begin_call)
        kept = count_partial(self.buffer, self.marks)
        certain = self.buffer[: len(self.buffer) - kept].rstrip()
        self.add_content(certain)
        self.buffer = self.buffer[len(certain) :]
        return False

    @abstractmethod
    def begin_call(self) -> bool:
        """Text right after a mark."""

    def begin_object(self) -> bool:
        """After a mark: an object, or a list of them."""
        if not self.skip():
            return False
        if self.buffer[0] == "[" and not self.is_list:
            self.is_list = True
            self.take(1)
            return True
        return self.read_object() if self.buffer[0] == "{" else self.give_up()

    def read_call(self) -> bool:
        """A call as JSON; then `end_call`, or text if it is not a call."""
        for position, char in enumerate(self.buffer):
            reading = self.reader.add(char)
            if reading is Reading.PART:
                continue
            if self.reader.is_behind_argument:
                found = match_mark(self.buffer[position:], (*self.closers, *self.marks))
                if found is None:
                    self._note_call(position)
                    return False
                if found[0]:
                    self.reader.end_arguments()
            # Models forget the last bracket: a call is complete without it.
            is_ended = reading is Reading.LAST or self.reader.end_early()
            self._note_call(position + (reading is Reading.LAST))
            if not is_ended:
                # Only new text is read again: going back to the mark could take quadratic time.
                return self.give_up()
            self.buffer, self.opening = self.opening + self.buffer, ""
            self.is_beside_call = True
            return self.go_to(self.end_call)
        self._note_call(len(self.buffer))
        return False

    def _note_call(self, count: int) -> None:
        """Consume what the reader has read."""
        self.events += self.reader.take_events()
        self.take(count)
        if self.reader.is_call:
            self.opening = self.opening[len(self.opening) - self.reader.num_held :]
            self.is_beside_call = False

    def end_call(self) -> bool:
        """After a whole call: its closing mark, the next call, or text."""
        gap = AFTER_CALL.match(self.buffer)
        length = gap.end() if gap else 0
        end_of_list = self.buffer.find("]", 0, length)
        if self.is_list and end_of_list >= 0:
            self.is_list = False
            self.buffer = self.buffer[end_of_list + 1 :]
            return True
        found = match_mark(self.buffer[length:], (*self.next_marks, *self.closers, *self.marks))
        if found is None:
            return False
        mark, end = found
        if mark in self.closers:
            self.buffer = self.buffer[length + end :]
            return self.go_to(self.after_close)
        if mark in self.next_marks:
            self.take(length)
            return self.read_object()
        if mark:
            self.buffer = self.buffer[length:]
        return self.go_to(self.read_text)

    def after_close(self) -> bool:
        """More closing marks, which models write twice or in another order, or text."""
        rest = self.buffer.lstrip()
        found = match_mark(rest, self.closers)
        if found is None:
            return False
        self.buffer = rest[found[1] :]
        return True if found[0] else self.go_to(self.read_text)

    # for states

    def go_to(self, state: Callable[[], bool]) -> bool:
        """Continue with `state`; always True."""
        self.state = state
        return True

    def read_object(self) -> bool:
        """Read a call as a JSON object; always True."""
        self.reader, self.next_marks = CallReader(self.argument_keys, self.names), ("{",)
        return self.go_to(self.read_call)

    def read_arguments(self, name: str) -> bool:
        """Read the arguments of a call as a JSON object; always True."""
        self.reader, self.next_marks = CallReader(name=name), ()
        return self.go_to(self.read_call)

    def give_up(self) -> bool:
        """The consumed text is not a call; always True."""
        self.add_content(self.opening)
        self.opening, self.is_list = "", False
        return self.go_to(self.read_text)

    def take(self, count: int) -> None:
        """Move characters from the buffer to the opening."""
        self.opening += self.buffer[:count]
        self.buffer = self.buffer[count:]

    def skip(self, characters: str = BLANK) -> bool:
        """Skip these characters at the front of the buffer; whether anything remains."""
        rest = self.buffer.lstrip(characters)
        if self.opening:
            self.opening += self.buffer[: len(self.buffer) - len(rest)]
        self.buffer = rest
        return bool(rest)

    def add_content(self, text: str) -> None:
        """Emit content, without white space after a call."""
        if self.is_beside_call:
            text = text.lstrip()
        if text:
            self.is_beside_call = False
            self.events.append(ToolEvent(ToolEventKind.CONTENT, text))

    def drop_gap(self) -> str:
        """The text held back after a call, or nothing if it may belong to the call."""
        rest = AFTER_CALL.sub("", self.buffer, count=1)
        is_closer = any(mark.startswith(rest) for mark in self.closers)
        return "" if is_closer or not rest else self.buffer

    def skip_second_mark(self) -> bool:
        """Skip a first mark that is written twice; False if more text is needed."""
        if not self.skip():
            return False
        found = match_mark(self.buffer, self.marks[:1])
        if found is None:
            return False
        if found[0] and self.opening.count(found[0]) == 1:
            self.take(found[1])
            return self.skip()
        return True


def find_first(text: str, marks: Sequence[str]) -> tuple[int, str]:
    """The position of the first mark, and the mark; "" if there is none."""
    return min(((text.find(mark), mark) for mark in marks if mark in text), default=(-1, ""))


def count_partial(text: str, marks: Sequence[str]) -> int:
    """The characters at the end of `text` that may begin a mark."""
    for length in range(min(len(text), max(map(len, marks)) - 1), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks if len(mark) > length):
            return length
    return 0


def match_mark(text: str, marks: Sequence[str]) -> tuple[str, int] | None:
    """The mark that `text` begins with and the position after it; "" and 0 for none, and None if
    more text is needed. Blanks before the last ">" of a mark do not matter.
    """
    is_part = False
    for mark in marks:
        if text.startswith(mark):
            return mark, len(mark)
        stem = mark.removesuffix(">")
        if stem != mark and text.startswith(stem):
            rest = text[len(stem) :].lstrip()
            if rest.startswith(">"):
                return mark, len(text) - len(rest) + 1
            is_part = is_part or not rest
        is_part = is_part or mark.startswith(text)
    return None if is_part else ("", 0)
