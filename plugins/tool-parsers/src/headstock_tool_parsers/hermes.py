"""The format of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from headstock_tool_parsers.call_parser import BLANK, CallParser


class HermesParser(CallParser):
    """Each call is a JSON object between two tags."""

    marks = ("<tool_call>",)
    call_openings = ("<tool_call>\n",)

    def begin_call(self) -> bool:
        """The object."""
        return self.read_object()

    def end_call(self) -> bool:
        """The closing tag; some models leave it out, or close the object twice before it."""
        return self.skip(BLANK + "}") and self.drop_close("</tool_call>")
