"""The formats of Mistral: `[TOOL_CALLS][{...}]`, and `[TOOL_CALLS]f[ARGS]{...}` since v11."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headstock.spi import Tool, WrittenCall
from headstock_tool_parsers.call_parser import CallParser, match_mark
from headstock_tool_parsers.call_reader import NAME

WORD = re.compile(r"\s*[A-Za-z0-9_.:/-]*\s*")
MAX_WORD = 128
ID, ARGUMENTS = "[CALL_ID]", "[ARGS]"


class MistralParser(CallParser):
    """The mark is followed by a list of objects, an object, or a name and its arguments."""

    marks = ("[TOOL_CALLS]",)
    call_openings = ("[TOOL_CALLS]",)
    call_marks = marks

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self.name = ""

    def begin_call(self) -> bool:
        """Objects, or a name."""
        if not self.skip_second_mark():
            return False
        return self.go_to(self.begin_object if self.buffer[0] in "[{" else self.read_name)

    def read_name(self) -> bool:
        """A name, up to what follows it."""
        word, mark = self._take_word((ARGUMENTS, ID, "{"))
        if mark is None:
            return False
        if not mark or not NAME.fullmatch(word):
            return self.give_up()
        self.name = word
        return self.go_to(self.skip_id if mark == ID else self.begin_arguments)

    def skip_id(self) -> bool:
        """The model's own id of a call, which is ignored."""
        _, mark = self._take_word((ARGUMENTS,))
        if mark is None:
            return False
        return self.go_to(self.begin_arguments) if mark else self.give_up()

    def begin_arguments(self) -> bool:
        """The object with the arguments begins; the mark before it may be missing."""
        if not self.skip():
            return False
        return self.read_arguments(self.name) if self.buffer[0] == "{" else self.give_up()

    def _take_word(self, marks: Sequence[str]) -> tuple[str, str | None]:
        """A word, and the mark after it, both consumed except a bracket.

        The mark is "" for none, and None if more text is needed.
        """
        word = WORD.match(self.buffer)
        end = word.end() if word else 0
        found = match_mark(self.buffer[end:], marks)
        name = self.buffer[:end].strip()
        if found is None and len(name) <= MAX_WORD:
            return "", None
        mark, length = found or ("", 0)
        self.take(end + (length if mark != "{" else 0))
        return name, mark

    def write_call(self, name: str) -> list[WrittenCall]:
        """A list of objects, or a name and its arguments."""
        return [
            WrittenCall(
                begin="[TOOL_CALLS][",
                before=f'{{"name": "{name}", "arguments": ',
                after="}",
                separator=", ",
                end="]",
            ),
            WrittenCall(before=f"[TOOL_CALLS]{name}[ARGS]", after="", separator=""),
        ]
