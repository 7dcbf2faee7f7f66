"""Command-line flags, generated from the settings."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve

from headstock.config.catalog import SettingName, engine_settings, sampling_settings
from headstock.config.effective import ResolvedConfig, merge_sources, take_meaning
from headstock.config.equivalents import SAME, TAKEN, find_meaning
from headstock.config.flag_parser import MODEL_FLAG, WORDS, FlagParser
from headstock.config.setting import Setting
from headstock.config.source_settings import CONFIG, PRESET
from headstock.config.sources import SourceValue
from headstock.config.value_types import Choice, Repeated, Switch
from headstock.errors import UsageError, shorten

DEST_PREFIX = "setting "
"""Where a parsed namespace keeps settings; no other flag's name has a space."""

FOREIGN_PREFIX = "foreign "
"""Where it keeps other engines' flags."""

GROUP_TITLES = {
    "sources": "sources",
    "model": "model",
    "parts": "plugins",
    "memory": "memory",
    "scheduling": "scheduling",
    "running": "running",
}


def add_engine_flags(parser: argparse.ArgumentParser, *, server: bool = False) -> None:
    """Add a flag for every field of EngineConfig, and `--config` and `--preset`.

    server: the help lists what matters to servers alone too
    """
    settings = (CONFIG, PRESET, *engine_settings().values())
    for group, title in GROUP_TITLES.items():
        section = parser.add_argument_group(title)
        for setting in settings:
            if setting.group == group:
                listed = setting.listed == "always" or (server and setting.listed == "server")
                _add_flag(section, setting, listed=listed)
    for name in sorted({*SAME, *TAKEN}):
        _add_foreign_flag(parser, name)


def _add_foreign_flag(parser: argparse.ArgumentParser, name: str) -> None:
    """Add another engine's flag, which the help leaves out."""

    class Remember(argparse.Action):
        def __call__(
            self,
            parser: argparse.ArgumentParser,
            namespace: argparse.Namespace,
            values: str | Sequence[object] | None,
            option_string: str | None = None,
        ) -> None:
            flag = str(option_string)
            value = flag != negative if values is None else read_foreign(str(values))
            meaning = find_meaning(name, value)
            if meaning is None and isinstance(parser, FlagParser):
                parser.refuse(flag)
            text = flag if values is None else f"{flag} {shorten(values)}"
            setattr(namespace, self.dest, (meaning, flag, text))

    flag = f"--{name.replace('_', '-')}"
    negative = f"--no-{name.replace('_', '-')}"
    options: dict[str, Any] = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
    options |= {"dest": FOREIGN_PREFIX + name, "nargs": "?", "action": Remember}
    parser.add_argument(flag, negative, **options)


def read_foreign(text: str) -> object:
    """The value of another engine's flag: a JSON value, or text."""
    try:
        return json.loads(text.lower())
    except ValueError:
        return text


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every sampling parameter."""
    section = parser.add_argument_group("sampling")
    for setting in sampling_settings().values():
        _add_flag(section, setting)


def _add_flag(
    section: argparse._ActionsContainer, setting: Setting, *, listed: bool = True
) -> None:
    """Add one setting's flag, its aliases, which the help leaves out, and its negative."""
    short = [alias for alias in setting.aliases if not alias.startswith("--")]
    also = f"; also {', '.join(short)}" if short else ""
    negative = f"; {setting.negative} turns it off" if setting.negative else ""
    # argparse takes a percent sign in help for a format.
    text = f"{setting.help} (default: {setting.default_text}{also}{negative})".replace("%", "%%")
    options: dict[str, Any] = {
        "dest": DEST_PREFIX + setting.key,
        # Without defaults the namespace holds only the flags that were given.
        "default": argparse.SUPPRESS,
        "metavar": _make_metavar(setting),
    }
    if isinstance(setting.value_type, Switch):
        options |= {"nargs": "?", "const": "on"}
    shown = text if listed else argparse.SUPPRESS
    section.add_argument(setting.flag, action=_make_action(setting), help=shown, **options)
    for alias in setting.aliases:
        # A separate argument, although argparse supports aliases: it would list all of them in the
        # help.
        section.add_argument(alias, action=_make_action(setting), help=argparse.SUPPRESS, **options)
    if setting.negative is not None:
        off = options | {"nargs": 0}
        section.add_argument(
            setting.negative, action=_make_action(setting), help=argparse.SUPPRESS, **off
        )


def _make_metavar(setting: Setting) -> str:
    """The placeholder of the value in the help."""
    match setting.value_type:
        case Choice(names=names):
            return "|".join(names)
        case Switch(word=word):
            return "on|off" if word is None else f"on|off|{word}"
        case Repeated(form=form):
            return form
        case value_type:
            return value_type.describe().split()[0].rstrip(",")


def _make_action(setting: Setting) -> type[argparse.Action]:
    """An argparse action that stores the value with the flag under which it was given."""

    class Remember(argparse.Action):
        def __call__(
            self,
            parser: argparse.ArgumentParser,
            namespace: argparse.Namespace,
            values: str | Sequence[object] | None,
            option_string: str | None = None,
        ) -> None:
            flag = str(option_string)
            name = SettingName(setting, flag if flag in setting.aliases else None)
            raw: object = "off" if flag == setting.negative else values
            if isinstance(setting.value_type, Repeated):
                # The last flag wins for other types; here each one adds to those before it.
                earlier = getattr(namespace, self.dest, None)
                raw = [*(earlier.raw if earlier is not None else ()), values]
            setattr(namespace, self.dest, SourceValue(name, raw, "flag", flag))

    return Remember


def resolve_flags(namespace: argparse.Namespace, environ: Mapping[str, str]) -> ResolvedConfig:
    """The configuration in effect for parsed flags; the first word without one is the model.

    raises: UsageError; ModelError when the file cannot be read
    """
    flags = {
        dest.removeprefix(DEST_PREFIX): value
        for dest, value in vars(namespace).items()
        if dest.startswith(DEST_PREFIX)
    }
    _add_model(flags, getattr(namespace, WORDS, ()))
    foreign: list[str] = []
    for dest, found in vars(namespace).items():
        if dest.startswith(FOREIGN_PREFIX):
            meaning, flag, text = found
            foreign += take_meaning(meaning, flags, "flag", flag, text)
    resolved = merge_sources(flags, environ, is_command=True)
    return evolve(resolved, notes=(*foreign, *resolved.notes))


def _add_model(flags: dict[str, SourceValue], words: Sequence[str]) -> None:
    """Take the first word for the model.   raises: UsageError"""
    if not words:
        return
    word, setting = words[0], engine_settings()["model"]
    given = flags.get(setting.key)
    if given is not None and given.raw != word:
        raise UsageError(
            f"the model is given twice, as {shorten(word)} and as {MODEL_FLAG} "
            f"{shorten(given.raw)}; give one"
        )
    if len(word.split()) != 1:
        raise UsageError(
            f"the first word is the model, and no model is called {shorten(word)}; give the model "
            "before a prompt"
        )
    flags[setting.key] = SourceValue(SettingName(setting), word, "flag", MODEL_FLAG)
