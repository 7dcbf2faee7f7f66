"""`headstock completion`: a script with which a shell completes verbs, flags and their values."""

from __future__ import annotations

import argparse
import contextlib
import importlib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from headstock import registry
from headstock.cli.main import VERBS
from headstock.cli.process import reserve_output
from headstock.config.catalog import engine_settings, sampling_settings
from headstock.config.flag_parser import FlagParser
from headstock.config.flags import DEST_PREFIX
from headstock.config.presets import PRESETS
from headstock.config.setting import Setting
from headstock.config.source_settings import CONFIG, PRESET
from headstock.config.value_types import Choice, Switch
from headstock.errors import HeadstockError
from headstock.spi import CommandSpec

SHELLS = ("bash", "zsh", "fish")

EPILOG = """
to install, where DIR is a folder of zsh's $fpath:
  headstock completion bash > \\
    ~/.local/share/bash-completion/completions/headstock
  headstock completion zsh > DIR/_headstock
  headstock completion fish > ~/.config/fish/completions/headstock.fish

Values name the plugins that are installed now, so make the script anew after installing one.
"""

PLUGIN_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "attn": "attention",
        "cache_type": "cache",
        "scheduler": "scheduler",
        "runner": "runner",
        "ops": "ops",
        "proposer": "proposer",
        "logits_processors": "logits",
        "grammar": "grammar",
        "model": "checkpoint",
    }
)
"""Setting -> the kind of plugin that its values name."""

FILE_SETTINGS = (DEST_PREFIX + "config", DEST_PREFIX + "record")
"""Settings that name a file, as a parser calls them."""

FILE_METAVARS = ("FILE", "OUT.")
"""How the metavar of every other argument begins that names a file."""


def main(arguments: list[str]) -> int:
    """Run `headstock completion ARGUMENTS` and return the exit code.   raises: UsageError"""
    import shtab

    args = make_parser().parse_args(arguments)
    with reserve_output():  # parsers are plugins' code too
        parser = _make_full_parser()
    print(shtab.complete(parser, args.shell))
    return 0


def make_parser() -> FlagParser:
    """The parser of `headstock completion`."""
    about = "Print a script with which a shell completes verbs, flags and their values."
    root = FlagParser(
        prog="headstock completion", usage="%(prog)s SHELL", description=about, epilog=EPILOG
    )
    root.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    return root


def _make_full_parser() -> argparse.ArgumentParser:
    """A parser of every verb, whose actions know what completes them; it never parses."""
    root = FlagParser(prog="headstock", usage="%(prog)s VERB [options]")
    root.add_argument("-v", "--verbose", action="store_true", help="show where an error came from")
    root.add_argument("-V", "--version", action="store_true", help="print the version")
    verbs = root.add_subparsers(dest="verb")
    for verb, summary in VERBS.items():
        verbs.add_parser(verb, help=summary, usage="")
        verbs.choices[verb] = importlib.import_module(f"headstock.cli.{verb}").make_parser()
        _set_completions(verbs.choices[verb])
    for plugin, spec in registry.load_specs("command"):
        # Core's verb runs where a plugin's has the same name.
        if plugin.name not in verbs.choices and plugin.status != "bad name":
            parser = _make_plugin_parser(spec)
            summary = getattr(spec, "summary", f"of {plugin.distribution}")
            verbs.add_parser(plugin.name, help=summary, usage="")
            verbs.choices[plugin.name] = parser
            _set_completions(parser)
    return root


def _make_plugin_parser(spec: CommandSpec | HeadstockError) -> FlagParser:
    """The parser of a plugin's command.

    Where the plugin names none, or is broken, a parser without flags: the other commands complete.
    """
    if isinstance(spec, CommandSpec) and spec.parser is not None:
        with contextlib.suppress(Exception, SystemExit):
            parser = registry.import_object(spec, spec.parser)()
            if isinstance(parser, FlagParser):
                return parser
    return FlagParser()


def _set_completions(parser: argparse.ArgumentParser) -> None:
    """Set on each action the values or the file names that complete it, where they are known.

    writes: the parser's actions
    """
    import shtab

    settings = {
        DEST_PREFIX + setting.key: setting
        for setting in (CONFIG, PRESET, *engine_settings().values())
    }
    settings |= {DEST_PREFIX + setting.key: setting for setting in sampling_settings().values()}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _set_completions(inner)
        elif action.dest in FILE_SETTINGS or str(action.metavar).startswith(FILE_METAVARS):
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab reads it
        elif (
            action.dest in settings
            and action.nargs != 0
            and (values := _list_values(settings[action.dest]))
        ):
            # shtab completes from choices. This parser never parses, so they refuse no value.
            action.choices = tuple(values)


def _list_values(setting: Setting) -> Iterable[str]:
    """The names to choose from for a setting; none for numbers and texts."""
    match setting.value_type:
        case Choice(names=names):
            return names
        case Switch():
            return ("on", "off")
    if setting.key == PRESET.key:
        return tuple(PRESETS)
    if setting.key in PLUGIN_KINDS:
        automatic = ("auto",) if setting.default == "auto" else ()
        return (
            *automatic,
            *sorted(
                {
                    plugin.name
                    for plugin in registry.list_installed(PLUGIN_KINDS[setting.key])
                    if plugin.status != "bad name"
                }
            ),
        )
    return ()
