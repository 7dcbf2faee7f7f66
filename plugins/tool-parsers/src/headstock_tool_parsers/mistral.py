"""The formats of Mistral: `[TOOL_CALLS][{...}]`, and `[TOOL_CALLS]f[ARGS]{...}` since v11."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headstock.spi import Tool, ToolEvent, ToolEventKind
from headstock_tool_parsers.call_parser import BLANK, CallParser, count_partial
from headstock_tool_parsers.json_text import Reading, ValueScanner

NAME = re.compile(r"[A-Za-z0-9_.-]+")
ID, ARGUMENTS = "[CALL_ID]", "[ARGS]"


class MistralParser(CallParser):
    """After the mark comes a list of objects, or a name and its arguments."""

    marks = ("[TOOL_CALLS]",)
    call_openings = ("[TOOL_CALLS]",)

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self.name = ""
        self.scanner = ValueScanner()

    def begin_call(self) -> bool:
        """A list, or a name."""
        if not self.skip():
            return False
        if self.buffer[0] == "[":
            self.take(1)
            return self.go_to(self.begin_object)
        self.name = ""
        return self.go_to(self.read_name) if NAME.match(self.buffer) else self.give_up()

    def begin_object(self) -> bool:
        """The first object of a list."""
        if not self.skip():
            return False
        return self.read_object() if self.buffer[0] == "{" else self.give_up()

    def end_call(self) -> bool:
        """The next object of a list, its end, or text."""
        if not self.skip(BLANK + ","):
            return False
        if self.buffer[0] == "{":
            return self.read_object()
        self.buffer = self.buffer.removeprefix("]")
        return self.go_to(self.read_text)

    def read_name(self) -> bool:
        """A name, up to what follows it."""
        name = NAME.match(self.buffer)
        if name is not None:
            self.name += name[0]
            self.take(name.end())
        rest = self.buffer
        if not rest:
            return False
        for mark, following in ((ARGUMENTS, self.begin_arguments), (ID, self.skip_id)):
            if rest.startswith(mark):
                self.take(len(mark))
                return self.go_to(following)
            if mark.startswith(rest):
                return False
        return self.go_to(self.begin_arguments)

    def skip_id(self) -> bool:
        """The model's own id of a call, which nothing reads."""
        before, mark, _ = self.buffer.partition(ARGUMENTS)
        if mark:
            self.take(len(before) + len(mark))
            return self.go_to(self.begin_arguments)
        self.take(len(self.buffer) - count_partial(self.buffer, (ARGUMENTS,)))
        return False

    def begin_arguments(self) -> bool:
        """The object with the arguments begins; the mark before it is left out at times."""
        if not self.skip():
            return False
        if self.buffer[0] != "{":
            return self.give_up()
        self.events.append(ToolEvent(ToolEventKind.CALL, self.name))
        self.opening, self.scanner = "", ValueScanner()
        return self.go_to(self.read_arguments)

    def read_arguments(self) -> bool:
        """The arguments, as they come."""
        for position, char in enumerate(self.buffer, start=1):
            if self.scanner.add(char) is Reading.LAST:
                self.events += [
                    ToolEvent(ToolEventKind.ARGUMENTS, self.buffer[:position]),
                    ToolEvent(ToolEventKind.END),
                ]
                self.is_beside_call = True
                self.buffer = self.buffer[position:]
                return self.go_to(self.read_text)
        self.events.append(ToolEvent(ToolEventKind.ARGUMENTS, self.buffer))
        self.buffer = ""
        return False
