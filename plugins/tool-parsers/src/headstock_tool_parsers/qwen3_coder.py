"""The format of Qwen3-Coder: `<function=f><parameter=k>v</parameter></function>` in a tag."""

from __future__ import annotations

import json
from collections.abc import Sequence

from headstock.spi import Tool, ToolEvent, ToolEventKind, WrittenCall
from headstock_tool_parsers.argument_types import ArgumentTypes
from headstock_tool_parsers.call_parser import CallParser, match_mark
from headstock_tool_parsers.call_reader import NAME
from headstock_tool_parsers.value_end import (
    CALL,
    END_CALL,
    END_FUNCTION,
    END_PARAMETER,
    FUNCTION,
    MAX_WORD,
    PARAMETER,
    ValueEnd,
    read_word,
)

MAX_STRAY = 200
"""Maximum characters between the arguments of a call that are not tags, including blanks."""


class Qwen3CoderParser(CallParser):
    """Arguments are text between tags. Their types are those of the tool's schema.

    The outer tag and closing tags may be missing: the next tag ends what is open. Arguments may be
    one JSON object instead of tags.

    stray: text between the arguments of a call; content, once the call is over
    """

    marks = (CALL, FUNCTION)
    closers = (END_FUNCTION, END_CALL, END_PARAMETER)
    call_openings = ("<tool_call>\n",)
    call_marks = marks

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self.name = self.key = self.stray = ""
        self.num_arguments = 0
        self.is_open = self.is_last = False  # whether the call has begun; no more text follows
        self.types = ArgumentTypes({})
        self.value_end = ValueEnd(self.tools, self.types)

    def finish(self) -> list[ToolEvent]:
        """The events of what was held back."""
        self.is_last = True
        while self.buffer and self.state():
            pass
        if self.state == self.begin_parameter:
            is_tag = match_mark(self.buffer, (PARAMETER, CALL, *self.closers)) is None
            if self.is_open:
                self.buffer = self.stray + ("" if is_tag else self.buffer)
            elif is_tag and self.name in self.tools and not self.stray:
                self._begin_call()
                self.buffer = ""
        elif self.is_open and self.state in (self.read_key, self.read_value):
            self.buffer = self.stray  # the argument is cut, and its value is unknown
        return super().finish()

    def write_call(self, name: str) -> list[WrittenCall]:
        """With all arguments as one JSON object: the end of a text is no matter of its schema."""
        return [
            WrittenCall(
                before=f"<tool_call>\n<function={name}>\n",
                after="\n</function>\n</tool_call>",
                separator="\n",
            )
        ]

    def begin_call(self) -> bool:
        """The inner tag."""
        self.is_open = False
        if self.opening.endswith(FUNCTION):
            return self.go_to(self.read_name)
        if not self.skip_second_mark():
            return False
        found = match_mark(self.buffer, (FUNCTION,))
        if found is None:
            return False
        self.take(found[1])
        return True if found[0] else self.give_up()

    def read_name(self) -> bool:
        """The name of the tool, up to the end of its tag."""
        word, end = read_word(self.buffer, blanks=True)
        if end is None:
            return False
        is_closed = self.buffer.startswith(">", end)
        # A tag without its end is text, except a tool name right before the next tag.
        is_bare_name = word in self.tools and self.buffer.startswith("<", end)
        if not (NAME.fullmatch(word) if is_closed else is_bare_name):
            return self.give_up()
        self.name, self.stray, self.num_arguments = word, "", 0
        tool = self.tools.get(word)
        self.types = ArgumentTypes({} if tool is None else tool.parameters)
        self.take(end + is_closed)
        return self.go_to(self.begin_parameter)

    def read_key(self) -> bool:
        """The name of an argument."""
        word, end = read_word(self.buffer)
        if end is None:
            return False
        if end > MAX_WORD:
            return self._abandon()
        self.key = word
        self._pass(end + self.buffer.startswith(">", end))
        self.value_end = ValueEnd(self.tools, self.types)
        return self.go_to(self.read_value)

    def read_value(self) -> bool:
        """The text of an argument, emitted when it is complete."""
        found = self.value_end.find(self.buffer, is_last=self.is_last)
        if found is None:
            return False
        length, end = found
        # A line break next to the tags is not part of the value.
        text = self.buffer[:length].removeprefix("\n").removesuffix("\n")
        if not self.is_open:
            self._begin_call()
        divider = ", " if self.num_arguments else ""
        key = json.dumps(self.key, ensure_ascii=False)
        value = self.types.spell_value(self.key, text)
        self._add(ToolEventKind.ARGUMENTS, f"{divider}{key}: {value}")
        self.num_arguments += 1
        self._pass(end)
        return self.go_to(self.begin_parameter)

    def begin_parameter(self) -> bool:
        """The next argument, all of them as JSON, or the end of the call."""
        num_blanks = len(self.buffer) - len(self.buffer.lstrip())
        if num_blanks:
            return self._add_stray(num_blanks) if self.stray else self._pass(num_blanks)
        is_first = not self.is_open
        found = match_mark(self.buffer, (PARAMETER, CALL, FUNCTION, *self.closers, "{"))
        if found is None:
            return False
        mark, end = found
        if mark == "{" and is_first and not self.stray:
            return self.read_arguments(self.name)
        if mark in ("", "{"):
            next_tag = self.buffer.find("<", 1)
            return self._add_stray(len(self.buffer) if next_tag < 0 else next_tag)
        if mark in (CALL, FUNCTION):
            return self.give_up() if is_first else self._end_function(mark)
        # Text that quotes the format does not name an offered tool.
        if is_first and (mark != PARAMETER or self.name in self.tools):
            self._begin_call()
        self._pass(end)
        if mark == END_PARAMETER:
            return True
        return self.go_to(self.read_key) if mark == PARAMETER else self._end_function(mark)

    def _add_stray(self, count: int) -> bool:
        """Set aside characters where a tag should be."""
        self.stray += self.buffer[:count]
        self._pass(count)
        is_call = self.is_open or self.name in self.tools
        return True if is_call and len(self.stray) <= MAX_STRAY else self._abandon()

    def _abandon(self) -> bool:
        """The following text is not part of the call, which then has no end."""
        if not self.is_open:
            return self.give_up()
        self.buffer, self.stray = self.stray + self.buffer, ""
        return self.go_to(self.read_text)

    def _end_function(self, mark: str) -> bool:
        """End the call at this tag; the next state reads the text after it."""
        self._add(ToolEventKind.ARGUMENTS, "}")
        self._add(ToolEventKind.END)
        self.is_beside_call, self.is_open, self.next_marks = True, False, ()
        self.add_content(self.stray.strip())
        return self.go_to(self.end_call if mark == END_FUNCTION else self.after_close)

    def _begin_call(self) -> None:
        self._add(ToolEventKind.CALL, self.name)
        self._add(ToolEventKind.ARGUMENTS, "{")
        self.opening, self.is_open, self.is_beside_call = "", True, False

    def _pass(self, count: int) -> bool:
        """Skip characters, which are kept until the call is certain; always True."""
        self.take(count)
        if self.is_open:
            self.opening = ""
        return True

    def _add(self, kind: ToolEventKind, text: str = "") -> None:
        self.events.append(ToolEvent(kind, text))
