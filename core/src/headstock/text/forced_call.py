"""A call that a request demands: the schema that makes an answer one, and how it is read."""

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

    JSON that they ask for is that of an answer's text, and a call has none.
    raises: RequestError when they ask for another structure
    """
    if params.structured_outputs is not None and not params.structured_outputs.schema:
        raise RequestError(
            "tool_choice requires a call, and the request asks for another structure too; leave "
            "one of them out",
            "tool_choice",
        )
    return params.replace({"structured_outputs": {"json": make_call_schema(tools)}})


def make_call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """The schema of the arguments of one tool, or of a name and arguments for several."""
    # Arguments are an object even where a schema does not say so.
    arguments = [{"type": "object", **tool.parameters} for tool in tools]
    if len(tools) == 1:
        return arguments[0]
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.name},
                "parameters": _make_resource(schema, f"urn:tool:{tool.name}"),
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool, schema in zip(tools, arguments, strict=True)
    ]
    return {"anyOf": calls}


def _make_resource(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """The schema as a separate resource, whose references begin at its root."""
    # An id is what JSON Schema bundles schemas by. Before draft 2019-09 it counted for nothing
    # beside a reference, so the draft is not said.
    return {key: value for key, value in schema.items() if key != "$schema"} | {"$id": name}


class ForcedCallParser(ToolParser):
    """Reads an answer of `make_call_schema`, without white space between tokens."""

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
        if not self._is_whole():
            events = self._list_events(len(self.text))
            is_call = self.is_open or not self.text
            return events if is_call else [ToolEvent(ToolEventKind.CONTENT, self.text)]
        return [*self._list_events(self._count_certain()), ToolEvent(ToolEventKind.END)]

    def _is_whole(self) -> bool:
        """Whether the text is a call with an object of arguments."""
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError):
            return False
        if not self.name:
            value = value.get("parameters") if OPENING.match(self.text) else None
        return isinstance(value, dict)

    def _count_certain(self) -> int:
        """The characters outside the end of the object around name and arguments."""
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
            if opening is None and not (self.name and self.text.lstrip().startswith("{")):
                return []
            self.is_open = True
            self.num_sent = 0 if opening is None else opening.end()
            name = self.name if opening is None else json.loads(opening[1])
            events.append(ToolEvent(ToolEventKind.CALL, name))
        if end > self.num_sent:
            events.append(ToolEvent(ToolEventKind.ARGUMENTS, self.text[self.num_sent : end]))
            self.num_sent = end
        return events
