"""A call that a request demands: the form that makes an answer one, and how it is read."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from headstock.errors import RequestError
from headstock.sampling_params import SamplingParams
from headstock.spi import Tool, ToolEvent, ToolEventKind, ToolParser

OPENING: Final = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"parameters"\s*:\s*(?=\S)'
)


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
    definitions: dict[str, Any] = {}
    calls = []
    for number, (tool, schema) in enumerate(zip(tools, arguments, strict=True)):
        # References begin at the root, so a schema that has any goes there under a name.
        moved = _move_references(schema, f"#/$defs/tool{number}")
        if moved != schema:
            definitions[f"tool{number}"] = moved
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.name},
                    "parameters": schema if moved == schema else {"$ref": f"#/$defs/tool{number}"},
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls} | ({"$defs": definitions} if definitions else {})


def _move_references(value: Any, root: str) -> Any:
    """A part of a schema with references to its root as references to `root`."""
    if isinstance(value, list):
        return [_move_references(each, root) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: root + each[1:]
        if key == "$ref" and isinstance(each, str) and each.startswith("#")
        else _move_references(each, root)
        for key, each in value.items()
    }


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
        return self._list_events(self._count_certain())

    def finish(self) -> list[ToolEvent]:
        """The rest; the end of the call if it is whole."""
        try:
            json.loads(self.text)
        except ValueError:
            return self._list_events(len(self.text))
        return [*self._list_events(self._count_certain()), ToolEvent(ToolEventKind.END)]

    def _count_certain(self) -> int:
        """The characters that are no part of the end of the object around name and arguments."""
        if self.name:
            return len(self.text)
        # A bracket at the end closes that object or one of the arguments'; white space before it
        # may belong to either.
        return len(self.text.rstrip().removesuffix("}").rstrip())

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
