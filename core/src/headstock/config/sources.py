"""Sources of values: environment variables, a file, a preset."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from attrs import frozen

from headstock.config.catalog import SettingName, engine_settings, find_setting_name, setting_names
from headstock.config.presets import find_preset
from headstock.config.setting import flag_to_key
from headstock.config.value_types import Value
from headstock.errors import ModelError, UsageError, shorten, suggest_name

PREFIX = "HEADSTOCK_"
OTHER_VARIABLES = frozenset({"HEADSTOCK_API_KEY", "HEADSTOCK_HISTORY", "HEADSTOCK_TRACEBACK"})
"""Variables with the prefix that are not settings."""


SourceKind = Literal["flag", "keyword", "environment", "file", "preset"]


@frozen
class SourceValue:
    """A value from the source `source_name`: a flag, keyword, variable, file or preset."""

    name: SettingName
    raw: object
    source_kind: SourceKind
    source_name: str

    def value(self) -> Value:
        """The checked value.   raises: UsageError"""
        return self.name.read(self.raw, self.where)

    @property
    def where(self) -> str:
        """Where the value was given: "page_size (--page-size)", "HEADSTOCK_PAGE_SIZE",
        "engine.toml: page_size" or "preset debug: page_size".
        """
        match self.source_kind:
            case "flag" | "keyword":
                return self.name.label
            case "environment":
                return self.source_name
            case "file":
                return f"{self.source_name}: {flag_to_key(self.name.flag)}"
            case "preset":
                return f"preset {self.source_name}: {flag_to_key(self.name.flag)}"

    @property
    def text(self) -> str:
        """Where the value was given, and the value."""
        signs = {"environment": "=", "file": " = ", "preset": " = "}
        return f"{self.where}{signs.get(self.source_kind, ' ')}{shorten(self.raw)}"

    @property
    def origin(self) -> str:
        """The kind of source, then the flag, variable, file or preset."""
        return f"{self.source_kind} {self.source_name}"

    def alias_notes(self) -> Iterable[str]:
        """One line when the alias that was used means something else in another engine."""
        if self.name.note:
            setting = self.name.setting
            yield (
                f"{self.text}: taken as {setting.label} "
                f"{setting.value_type.show(self.value())}, {self.name.note}"
            )


SourceValues = Mapping[str, SourceValue]
"""Setting's key -> the value that one source, or several merged, gave it."""

FILE_FORMATS = {".json": "JSON", ".yaml": "YAML", ".yml": "YAML"}
"""Ending of a file's name -> the format of its settings; any other file is TOML."""


def from_environment(environ: Mapping[str, str]) -> tuple[SourceValues, tuple[str, ...]]:
    """What `HEADSTOCK_*` variables and LOG_LEVEL set, and a line for each that looks misspelt.

    An empty variable counts as not set.
    raises: UsageError when two variables set one value
    """
    values: dict[str, SourceValue] = {}
    notes = []
    # LOG_LEVEL first: HEADSTOCK_LOG_LEVEL, which is more precise, then replaces it.
    if environ.get("LOG_LEVEL"):
        values["log_level"] = _read_variable(
            SettingName(engine_settings()["log_level"]), "LOG_LEVEL", environ["LOG_LEVEL"]
        )
    for variable, text in sorted(environ.items()):
        word = variable.removeprefix(PREFIX).lower()
        # Empty counts as unset: shells and containers cannot always unset a variable.
        if not variable.startswith(PREFIX) or not text or variable in OTHER_VARIABLES:
            continue
        if word in setting_names():
            value = _read_variable(setting_names()[word], variable, text)
            check_set_once(values, value, except_by="LOG_LEVEL")
            values[value.name.setting.key] = value
        # Only pointed out: the variable may belong to a newer version, or to another program.
        elif close := suggest_name(
            variable, (PREFIX + key.upper() for key in setting_names()), prefix=PREFIX
        ):
            notes.append(f"{variable} is not a setting and has no effect{close}")
    return values, tuple(notes)


def _read_variable(name: SettingName, variable: str, text: str) -> SourceValue:
    """The value of one environment variable."""
    return SourceValue(name, text, "environment", variable)


def check_set_once(values: SourceValues, value: SourceValue, except_by: str | None = None) -> None:
    """Raise UsageError when `values` has `value`'s setting already, by a name but `except_by`."""
    earlier = values.get(value.name.setting.key)
    if earlier is not None and earlier.source_name != except_by:
        raise UsageError(f"{earlier.text} and {value.text} set the same value; keep one of them")


def from_file(path: str) -> SourceValues:
    """What a TOML, JSON or YAML file sets.

    raises: ModelError when it cannot be read; UsageError for an unknown key
    """
    values: dict[str, SourceValue] = {}
    for word, raw in _read_settings_file(Path(path)).items():
        name = find_setting_name(word, setting_names(), path)
        value = SourceValue(name, raw, "file", path)
        if name.setting.key == "config":
            raise UsageError(f"{value.text}: a file cannot name another file")
        check_set_once(values, value)
        values[name.setting.key] = value
    return values


def _read_settings_file(path: Path) -> Mapping[str, object]:
    """The top-level table of a file.   raises: ModelError"""
    file_format = FILE_FORMATS.get(path.suffix.lower(), "TOML")
    try:
        table = _parse_settings(file_format, path.read_bytes().decode())
    except OSError as error:
        raise ModelError(
            f"config (--config) {shorten(path)}: cannot be read: {error.strerror}"
        ) from None
    # RecursionError: all three parsers recurse into brackets, and a file may be anything.
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"config (--config) {shorten(path)}: not valid {file_format}: {shorten(error, 120)}"
        ) from None
    if not isinstance(table, dict):
        what = "a JSON object" if file_format == "JSON" else "a mapping"
        raise ModelError(
            f"config (--config) {shorten(path)}: expected {what} of settings, got "
            f"{type(table).__name__}"
        )
    return table


def _parse_settings(file_format: str, text: str) -> object:
    """The value that `text` spells in TOML, JSON or YAML.   raises: ValueError, RecursionError"""
    match file_format:
        case "JSON":
            # json keeps the last of two equal keys without a word, TOML and YAML here refuse them.
            return json.loads(text, object_pairs_hook=_refuse_repeated_keys)
        case "YAML":
            # deferred for start-up time: few starts read a file, and PyYAML takes a tenth of a
            # second to import
            from headstock.config.yaml_file import read_yaml

            return read_yaml(text)
        case _:
            return tomllib.loads(text)


def _refuse_repeated_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The pairs as a mapping.   raises: ValueError when a key comes twice"""
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a key comes twice in one object")
    return table


def from_preset(requested: SourceValue) -> SourceValues:
    """The values of a preset.   raises: UsageError without such a preset"""
    name = str(requested.value())
    return {
        key: SourceValue(SettingName(engine_settings()[key]), raw, "preset", name)
        for key, raw in find_preset(name, requested.where).items()
    }
