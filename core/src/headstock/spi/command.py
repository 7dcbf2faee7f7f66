"""Commands that plugins add to the command line."""

from __future__ import annotations

from attrs import frozen

from headstock.spi.plugin import PluginSpec


@frozen(kw_only=True)
class CommandSpec(PluginSpec):
    """A verb of the command line; `implementation` names `main(arguments: list[str]) -> int`, the
    exit code.
    """
