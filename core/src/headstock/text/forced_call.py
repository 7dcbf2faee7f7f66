"""A call that a request demands: the form that makes an answer one, and how it is read."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from headstock.errors import RequestError
from headstock.sampling_params import SamplingParams
from headstock.spi import Tool, ToolEvent, ToolEventKind, ToolParser

OPENING: Final = re.compile(r'\{"name":("(?:[^"\\]|\\.)*"),"parameters":')


def force_call(params: SamplingParams, tools: Sequence[Tool]) -> SamplingParams:
    """Parameters with which an answer is a call of one of the tools.

    raises: RequestError when they ask for another form
    """
    if params.structured_outputs is not None:
        raise RequestError(
            "tool_choice demands a call, and structured_outputs another form; leave one of them "
            "out",
            "tool_choice",
        )
    return params.replace({"structured_outputs": {"json": make_call_schema(tools)}})


def make_call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """The schema of the arguments of one tool, or of a name and arguments for several."""
    arguments = [dict(tool.parameters) or {"type": "object"} for tool in tools]
    # The schema itself where it can be: references in it begin at its root.
    if len(tools) == 1:
        return arguments[0]
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "parameters": schema},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool, schema in zip(tools, arguments, strict=True)
    ]
    return {"anyOf": calls}


class ForcedCallParser(ToolParser):
    """Reads an answer in the form of `make_call_schema`, without white space between tokens."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.name = tools[0].name if len(tools) == 1 else ""
        self.text = ""
        self.num_sent = 0
        self.is_open = False

    def feed(self, text: str) -> list[ToolEvent]:
        """The name once it is there, and then the arguments."""
        self.text += text
        # The last bracket closes the object around name and arguments.
        return self._list_events(len(self.text) - (0 if self.name else 1))

    def finish(self) -> list[ToolEvent]:
        """The rest; the end of the call if it is whole."""
        try:
            json.loads(self.text)
        except ValueError:
            return self._list_events(len(self.text))
        end = len(self.text) - (0 if self.name else 1)
        return [*self._list_events(end), ToolEvent(ToolEventKind.END)]

    def _list_events(self, end: int) -> list[ToolEvent]:
        """The events of the text up to `end`."""
        events = []
        if not self.is_open:
            opening = None if self.name else OPENING.match(self.text)
            if opening is None and not (self.name and self.text):
                return []
            self.is_open = True
            self.num_sent = 0 if opening is None else opening.end()
            name = self.name if opening is None else json.loads(opening[1])
            events.append(ToolEvent(ToolEventKind.CALL, name))
        if end > self.num_sent:
            events.append(ToolEvent(ToolEventKind.ARGUMENTS, self.text[self.num_sent : end]))
            self.num_sent = end
        return events
