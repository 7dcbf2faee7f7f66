"""Select the tool parser of a model's answers, if it has one."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from headstock import registry
from headstock.errors import PluginBroken, shorten
from headstock.selection.refusals import check_resolve
from headstock.spi import DeviceEnv, Tool, ToolParser, ToolParserSpec


@frozen
class SelectedToolParser:
    """A tool parser that can be made; `label` is what errors call it."""

    spec: ToolParserSpec
    label: str

    def make(self, tools: Sequence[Tool]) -> ToolParser:
        """A parser for one answer.   raises: PluginBroken"""
        parser: ToolParser = registry.make_part(self.spec, ToolParser, tuple(tools))
        for name in ("call_openings", "call_marks", "call_starts"):
            texts = getattr(parser, name)
            if not isinstance(texts, tuple) or not all(
                isinstance(text, str) and text for text in texts
            ):
                raise PluginBroken(
                    f"{self.label}: {name}: expected a tuple of texts that are not empty, got "
                    f"{shorten(texts)}; report it there"
                )
        return parser


def select_tool_parser(name: str) -> SelectedToolParser:
    """The tool parser of this name.

    raises: UnknownPlugin, AmbiguousPlugin, PluginBroken, SpiMismatch, CannotRun
    """
    spec: ToolParserSpec = registry.load_spec("tools", name)
    registry.require_installed(spec)
    # Parsers run on the host, in a process that may have no device.
    check_resolve(spec, "tool_parser (--tool-parser)", None, DeviceEnv(device="cpu"))
    return SelectedToolParser(spec, str(registry.find_plugin("tools", name)))
