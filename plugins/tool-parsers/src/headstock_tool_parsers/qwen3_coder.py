"""The format of Qwen3-Coder: `<function=f><parameter=k>v</parameter></function>` in a tag."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from headstock.spi import Tool, ToolEvent, ToolEventKind
from headstock_tool_parsers.argument_types import ArgumentTypes
from headstock_tool_parsers.call_parser import CallParser, count_partial

FUNCTION, PARAMETER = "<function=", "<parameter="
END_FUNCTION, END_PARAMETER = "</function>", "</parameter>"
NAME = re.compile(r"[^<>\n]*")


class Qwen3CoderParser(CallParser):
    """Arguments are text between tags. Their types are those of the tool's schema.

    The outer tag is left out at times.
    """

    marks = ("<tool_call>", FUNCTION)
    call_openings = ("<tool_call>\n",)

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self.name = self.key = self.value = ""
        self.num_arguments = 0

    def begin_call(self) -> bool:
        """The inner tag."""
        if self.opening.endswith(FUNCTION):
            self.name = ""
            return self.go_to(self.read_name)
        if not self.skip():
            return False
        if self.buffer.startswith(FUNCTION):
            self.take(len(FUNCTION))
            return True
        return False if FUNCTION.startswith(self.buffer) else self.give_up()

    def read_name(self) -> bool:
        """The name of the tool, up to the end of its tag."""
        name = self._read_word()
        self.name += name
        self.take(len(name))
        if not self.buffer:
            return False
        if self.buffer[0] != ">" or not self.name:
            return self.give_up()
        self.buffer, self.opening = self.buffer[1:], ""
        self._add(ToolEventKind.CALL, self.name)
        self._add(ToolEventKind.ARGUMENTS, "{")
        self.num_arguments = 0
        return self.go_to(self.begin_parameter)

    def begin_parameter(self) -> bool:
        """The next argument, or the end of the call."""
        if not self.skip():
            return False
        for mark in (PARAMETER, END_FUNCTION):
            if self.buffer.startswith(mark):
                self.buffer = self.buffer[len(mark) :]
                if mark == PARAMETER:
                    self.key = self.value = ""
                    return self.go_to(self.read_key)
                self._add(ToolEventKind.ARGUMENTS, "}")
                self._add(ToolEventKind.END)
                self.is_beside_call = True
                return self.go_to(self.end_call)
            if mark.startswith(self.buffer):
                return False
        return self.go_to(self.read_text)

    def read_key(self) -> bool:
        """The name of an argument."""
        word = self._read_word()
        self.key += word
        self.buffer = self.buffer[len(word) :]
        if not self.buffer:
            return False
        self.buffer = self.buffer.removeprefix(">")
        return self.go_to(self.read_value)

    def read_value(self) -> bool:
        """The text of an argument, which goes out when it is whole."""
        value, mark, rest = self.buffer.partition(END_PARAMETER)
        if mark:
            self.value += value
            self.buffer = rest
            self._add_argument()
            return self.go_to(self.begin_parameter)
        kept = count_partial(self.buffer, (END_PARAMETER,))
        self.value += self.buffer[: len(self.buffer) - kept]
        self.buffer = self.buffer[len(self.buffer) - kept :]
        return False

    def end_call(self) -> bool:
        """The closing tag."""
        return self.drop_close("</tool_call>")

    def _read_word(self) -> str:
        match = NAME.match(self.buffer)
        return match[0] if match else ""

    def _add_argument(self) -> None:
        """Give out an argument; a line break beside its tags is no part of it."""
        text = self.value.removeprefix("\n").removesuffix("\n")
        tool = self.tools.get(self.name)
        types = ArgumentTypes({} if tool is None else tool.parameters)
        value = types.spell_value(self.key, text)
        divider = ", " if self.num_arguments else ""
        self.num_arguments += 1
        key = json.dumps(self.key, ensure_ascii=False)
        self._add(ToolEventKind.ARGUMENTS, f"{divider}{key}: {value}")

    def _add(self, kind: ToolEventKind, text: str = "") -> None:
        self.events.append(ToolEvent(kind, text))
