"""What the parsers share: text around calls, and marks that may be cut anywhere."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

from headstock.spi import Tool, ToolEvent, ToolEventKind, ToolParser
from headstock_tool_parsers.json_text import CallReader, Reading

BLANK = " \t\r\n"


class CallParser(ToolParser):
    """A parser that is in one state at a time; a call begins with one of `marks`.

    A state takes what is certain from the front of `buffer`. It returns True when the next state
    should look at the rest, and False when more text must come.

    opening: what was taken since a call may have begun; content, if it turns out to be none
    """

    marks: tuple[str, ...] = ()
    argument_keys: tuple[str, ...] = ("arguments", "parameters")

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.buffer = ""
        self.opening = ""
        self.events: list[ToolEvent] = []
        self.state: Callable[[], bool] = self.read_text
        self.reader = CallReader(())
        self.is_beside_call = False

    def feed(self, text: str) -> list[ToolEvent]:
        """The events that `text` makes certain."""
        self.buffer += text
        while self.buffer and self.state():
            pass
        return self._take_events()

    def finish(self) -> list[ToolEvent]:
        """The events of what was held back."""
        if self.state == self.read_call and self.reader.end_early():
            self.events += self.reader.take_events()
        if self.opening:
            self.add_content(self.opening + self.buffer)
        elif self.holds_text and not (self.is_beside_call and self.buffer.isspace()):
            self.add_content(self.buffer)
        return self._take_events()

    def _take_events(self) -> list[ToolEvent]:
        events, self.events = self.events, []
        return events

    @property
    def holds_text(self) -> bool:
        """Whether what is held back is text, and not what follows a call."""
        return self.state == self.read_text

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
            # White space before a call is dropped with the mark, and kept where there is none.
            self.take(start - len(before) + len(mark))
            return self.go_to(self.begin_call)
        kept = count_partial(self.buffer, self.marks)
        certain = self.buffer[: len(self.buffer) - kept].rstrip()
        self.add_content(certain)
        self.buffer = self.buffer[len(certain) :]
        return False

    @abstractmethod
    def begin_call(self) -> bool:
        """What comes right after a mark."""

    def read_call(self) -> bool:
        """A call as a JSON object; `end_call` follows, or text when it is none."""
        for position, char in enumerate(self.buffer):
            reading = self.reader.add(char)
            if reading is Reading.PART:
                continue
            # Models forget the last bracket: a call is one without it.
            is_ended = reading is Reading.LAST or self.reader.end_early()
            is_call = self._note_call(position)
            if is_ended:
                self.is_beside_call = True
                if reading is Reading.LAST:
                    self.buffer = self.buffer[1:]
                return self.go_to(self.end_call)
            # Only what comes now is looked at again: going back to the mark could take as long as
            # the answer squared.
            return self.go_to(self.read_text) if is_call else self.give_up()
        self._note_call(len(self.buffer))
        return False

    def _note_call(self, count: int) -> bool:
        """Take what the reader has read; whether it is certain to be a call."""
        self.events += self.reader.take_events()
        self.take(count)
        if self.reader.is_call:
            self.opening = ""
        return self.reader.is_call

    @abstractmethod
    def end_call(self) -> bool:
        """What comes right after a whole call."""

    # for states

    def go_to(self, state: Callable[[], bool]) -> bool:
        """Have `state` look at the rest; always True."""
        self.state = state
        return True

    def read_object(self) -> bool:
        """Read a call as a JSON object; always True."""
        self.reader = CallReader(self.argument_keys, self.names)
        return self.go_to(self.read_call)

    def give_up(self) -> bool:
        """What was taken is no call; always True."""
        self.add_content(self.opening)
        self.opening = ""
        return self.go_to(self.read_text)

    def take(self, count: int) -> None:
        """Move characters from the buffer to the opening."""
        self.opening += self.buffer[:count]
        self.buffer = self.buffer[count:]

    def skip(self, characters: str = BLANK) -> bool:
        """Pass over these characters at the front of the buffer; whether anything is left."""
        rest = self.buffer.lstrip(characters)
        if self.opening:
            self.opening += self.buffer[: len(self.buffer) - len(rest)]
        self.buffer = rest
        return bool(rest)

    def add_content(self, text: str) -> None:
        """Give out text for the reader, without white space that follows a call."""
        if self.is_beside_call:
            text = text.lstrip()
        if text:
            self.is_beside_call = False
            self.events.append(ToolEvent(ToolEventKind.CONTENT, text))

    def drop_close(self, mark: str) -> bool:
        """Drop a closing mark, then go on with text; False while it may be incomplete."""
        if not self.skip() or (self.buffer != mark and mark.startswith(self.buffer)):
            return False
        self.buffer = self.buffer.removeprefix(mark)
        return self.go_to(self.read_text)


def find_first(text: str, marks: Sequence[str]) -> tuple[int, str]:
    """Where the first of the marks begins, and which it is; "" when there is none."""
    return min(((text.find(mark), mark) for mark in marks if mark in text), default=(-1, ""))


def count_partial(text: str, marks: Sequence[str]) -> int:
    """The characters at the end of `text` that may begin a mark."""
    for length in range(min(len(text), max(map(len, marks)) - 1), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks if len(mark) > length):
            return length
    return 0
