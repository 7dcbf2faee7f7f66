"""The format of Llama 3: `{"name": ..., "parameters": {...}}`, perhaps after `<|python_tag|>`."""

from __future__ import annotations

from collections.abc import Sequence

from headstock.spi import Tool, WrittenCall
from headstock_tool_parsers.call_parser import BLANK, CallParser


class Llama3JsonParser(CallParser):
    """An answer that begins with an object is a call, and so is an object after the tag; several
    are separated by semicolons or commas, or in a list.

    There is no closing mark, and users also ask for JSON: an object is only a call if it names a
    tool of the request.
    """

    marks = ("<|python_tag|>",)
    call_openings = ("<|python_tag|>",)
    call_marks = marks
    call_starts = ("{", "[")
    argument_keys = ("parameters", "arguments")

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self.state = self.begin_answer

    @property
    def names(self) -> frozenset[str]:
        """The tools of the request."""
        return frozenset(self.tools)

    def begin_answer(self) -> bool:
        """The first character that is not white space decides."""
        rest = self.buffer.lstrip(BLANK)
        if not rest:
            return False
        if rest[0] not in "{[":
            return self.go_to(self.read_text)
        self.take(len(self.buffer) - len(rest))
        return self.go_to(self.begin_object)

    def begin_call(self) -> bool:
        """After a tag: objects, or code, which is text here."""
        return self.skip_second_mark() and self.begin_object()

    def write_call(self, name: str) -> list[WrittenCall]:
        """Without the tag, which models write before code only."""
        return [
            WrittenCall(before=f'{{"name": "{name}", "parameters": ', after="}", separator="; ")
        ]
