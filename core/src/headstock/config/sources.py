"""Where values come from: environment variables, a file, a preset. Each source maps setting keys to
what it gave.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from headstock.config.catalog import SettingName, engine_settings, find_setting_name, setting_names
from headstock.config.presets import find_preset
from headstock.config.setting import flag_to_key
from headstock.config.value_types import Value, suggestion
from headstock.errors import ModelError, UsageError, shorten

PREFIX = "HEADSTOCK_"
OTHER_VARIABLES = frozenset({"HEADSTOCK_HISTORY", "HEADSTOCK_TRACEBACK"})
"""Variables with the prefix that are no settings."""


@frozen
class SourceValue:
    """A value as one source gave it: under which name, in which words, and how the user put it."""

    name: SettingName
    raw: object
    source_kind: str
    source_name: str
    source_text: str

    def value(self) -> Value:
        """The checked value.   raises: UsageError"""
        name = (
            self.source_name if self.source_kind in ("flag", "keyword") else self.name.alias or ""
        )
        is_short = name.startswith("-") and not name.startswith("--")
        return self.name.read(
            self.raw,
            self.source_text,
            flag_to_key(name) if name and not is_short else self.name.setting.key,
        )

    @property
    def origin(self) -> str:
        """The rank, then the flag, variable, file or preset."""
        return f"{self.source_kind} {self.source_name}"

    def notes(self) -> Iterable[str]:
        """One line when the alias used means something else in another engine."""
        if self.name.note:
            setting = self.name.setting
            yield (
                f"{self.source_text}: taken as {setting.flag} "
                f"{setting.value_type.show(self.value())}, {self.name.note}"
            )


SourceValues = Mapping[str, SourceValue]

FILE_FORMATS = {".json": "JSON", ".yaml": "YAML", ".yml": "YAML"}
"""The ending of a file's name -> the form of its settings; any other name is TOML's."""


def from_environment(environ: Mapping[str, str]) -> tuple[SourceValues, tuple[str, ...]]:
    """What `HEADSTOCK_*` variables (and LOG_LEVEL) set, and a line for each that looks misspelt.
    Empty means unset.
    """
    source: dict[str, SourceValue] = {}
    notes = []
    if environ.get("LOG_LEVEL"):
        source["log_level"] = read_variable(
            SettingName(engine_settings()["log_level"]), "LOG_LEVEL", environ["LOG_LEVEL"]
        )
    for name, text in sorted(environ.items()):
        word = name.removeprefix(PREFIX).lower()
        if not name.startswith(PREFIX) or not text or name in OTHER_VARIABLES:
            continue
        if word in setting_names():
            given = read_variable(setting_names()[word], name, text)
            source[given.name.setting.key] = check_set_once(source, given, over="LOG_LEVEL")
        elif close := suggestion(
            name, (PREFIX + key.upper() for key in setting_names()), prefix=PREFIX
        ):
            notes.append(f"{name} is not a setting and has no effect{close}")
    return source, tuple(notes)


def read_variable(name: SettingName, called: str, text: str) -> SourceValue:
    """What one environment variable gave."""
    return SourceValue(name, text, "environment", called, f"{called}={shorten(text)}")


def check_set_once(
    source: SourceValues, given: SourceValue, over: str | None = None
) -> SourceValue:
    """`given`, unless the source has set the same value under another name (other than `over`).

    raises: UsageError
    """
    earlier = source.get(given.name.setting.key)
    if earlier is not None and earlier.source_name != over:
        raise UsageError(
            f"{earlier.source_text} and {given.source_text} set the same value; keep one of them"
        )
    return given


def from_file(path: str) -> SourceValues:
    """What a TOML, JSON or YAML file sets.

    raises: ModelError when it cannot be read; UsageError for an unknown key
    """
    source: dict[str, SourceValue] = {}
    for word, raw in read_table(Path(path)).items():
        name = find_setting_name(word, setting_names(), path)
        given = SourceValue(name, raw, "file", path, f"{path}: {word} = {shorten(raw)}")
        if name.setting.key == "config":
            raise UsageError(f"{given.source_text}: a file cannot name another file")
        source[name.setting.key] = check_set_once(source, given)
    return source


def read_table(path: Path) -> Mapping[str, Any]:
    """The top-level table of a file.   raises: ModelError"""
    form = FILE_FORMATS.get(path.suffix.lower(), "TOML")
    try:
        table = parse_settings(form, path.read_bytes().decode())
    except OSError as error:
        raise ModelError(f"--config {shorten(path)}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"--config {shorten(path)}: not valid {form}: {shorten(error, 120)}"
        ) from None
    if not isinstance(table, dict):
        what = "a JSON object" if form == "JSON" else "a mapping"
        raise ModelError(
            f"--config {shorten(path)}: wanted {what} of settings, found {type(table).__name__}"
        )
    return table


def parse_settings(form: str, text: str) -> object:
    """The value that `text` spells in TOML, JSON or YAML.   raises: ValueError, RecursionError"""
    match form:
        case "JSON":
            return json.loads(text, object_pairs_hook=refuse_repeated_keys)
        case "YAML":
            # only here: not every start reads a file
            from headstock.config.yaml_file import read_yaml

            return read_yaml(text)
        case _:
            return tomllib.loads(text)


def refuse_repeated_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The pairs as a mapping.   raises: ValueError when a key comes twice"""
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a key comes twice in one object")
    return table


def from_preset(asked: SourceValue) -> SourceValues:
    """What a preset sets.   raises: UsageError when there is none of that name"""
    name = str(asked.value())
    return {
        key: SourceValue(
            SettingName(engine_settings()[key]),
            raw,
            "preset",
            name,
            f"preset {name} ({key} = {raw})",
        )
        for key, raw in find_preset(name, asked.source_text).items()
    }
