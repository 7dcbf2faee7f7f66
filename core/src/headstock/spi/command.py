"""Commands that plugins add to the command line."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import optional

from headstock.spi.plugin import PluginSpec, check_path


@frozen(kw_only=True)
class CommandSpec(PluginSpec):
    """A command of `headstock`: `headstock NAME ARGUMENTS`.

    implementation: `main(arguments: list[str]) -> int`, the exit code. A HeadstockError that it
        raises becomes one line on standard error and the error's exit code.
    parser: dotted path of `make_parser() -> headstock.config.FlagParser`, from which
        `headstock completion` learns the command's flags; None completes the name alone
    """

    parser: str | None = field(default=None, validator=optional(check_path))
