"""The format of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from headstock.spi import WrittenCall
from headstock_tool_parsers.call_parser import CallParser


class HermesParser(CallParser):
    """Each call is a JSON object between two tags; some models write several there."""

    marks = ("<tool_call>",)
    closers = ("</tool_call>",)
    call_openings = ("<tool_call>\n",)
    call_marks = marks

    def begin_call(self) -> bool:
        """The object, or a list of them."""
        return self.skip_second_mark() and self.begin_object()

    def write_call(self, name: str) -> list[WrittenCall]:
        """As Qwen3 writes calls, with the tags on lines of their own."""
        return [
            WrittenCall(
                before=f'<tool_call>\n{{"name": "{name}", "arguments": ',
                after="}\n</tool_call>",
                separator="\n",
            )
        ]
