"""One setting: its names, the type of its value, its default and its help."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import attrs
from attrs import frozen

from headstock.config.value_types import InvalidValue, Switch, Value, ValueType
from headstock.errors import UsageError, name_setting

Listed = Literal["always", "server", "never"]


@frozen(kw_only=True)
class Setting:
    """One configuration value, with its flag, variable, file key and Python keyword.

    - `aliases`: other engines' flags, each with a note for its users, or ""
    - `default_text`: what the default means, where its value does not say
    - `negative`: the flag that turns a switch off
    - `shapes_steps`: whether the memory of steps may depend on it
    - `listed`: which commands' help lists it. One that another setting's text names is never
      listed by itself.
    """

    name: str
    flag: str
    value_type: ValueType
    help: str
    aliases: Mapping[str, str]
    default: object
    default_text: str
    negative: str | None = None
    group: str = ""
    shapes_steps: bool = True
    listed: Listed = "always"

    @property
    def key(self) -> str:
        """The name in files, variables (in capitals) and listings: the flag with underscores."""
        return flag_to_key(self.flag)

    @property
    def label(self) -> str:
        """The name in messages, for Python and the command line alike."""
        return name_setting(self.name, self.flag)

    def read(self, raw: object, where: str) -> Value:
        """The value that `raw` stands for.

        raises: UsageError, which begins with `where` the value was given
        """
        try:
            return self.value_type.read(raw)
        except InvalidValue as broken:
            raise UsageError(f"{where}: {broken}") from None


def flag_to_key(flag: str) -> str:
    """The flag as a name: no dashes in front, underscores inside."""
    return flag.lstrip("-").replace("-", "_")


def make_negative_flag(flag: str, value_type: ValueType) -> str | None:
    """The flag that turns a switch off; None for other types."""
    return f"--no-{flag.removeprefix('--')}" if isinstance(value_type, Switch) else None


def setting_field(
    flag: str,
    value_type: ValueType,
    default: object,
    text: str,
    *,
    aliases: Mapping[str, str] | tuple[str, ...] = (),
    default_text: str = "",
    group: str = "",
    shapes_steps: bool = True,
    listed: Listed = "always",
) -> Any:
    """An attrs field that converts and checks its value and carries the setting as metadata.

    shapes_steps: whether the memory of steps may depend on it, by more than the model's parameters
    """
    notes = dict(aliases) if isinstance(aliases, Mapping) else dict.fromkeys(aliases, "")
    metadata = {
        "flag": flag,
        "value_type": value_type,
        "help": text,
        "aliases": notes,
        "default_text": default_text,
        "negative": make_negative_flag(flag, value_type),
        "group": group,
        "shapes_steps": shapes_steps,
        "listed": listed,
    }

    # A converter and not a validator, because reading also changes the value: "on" to True.
    def convert(raw: object, field: attrs.Attribute[Any]) -> Value:
        """The checked value."""
        try:
            return value_type.read(raw)
        except InvalidValue as broken:
            raise UsageError(f"{name_setting(field.name, flag)}: {broken}") from None

    return attrs.field(
        default=default, converter=attrs.Converter(convert, takes_field=True), metadata=metadata
    )


def collect_settings(cls: type[attrs.AttrsInstance]) -> Mapping[str, Setting]:
    """The settings of a class whose fields `setting_field` made, by field name, in their order."""
    fields = [field for field in attrs.fields(cls) if "flag" in field.metadata]
    return MappingProxyType({field.name: _make_setting(field) for field in fields})


def _make_setting(field: attrs.Attribute[Any]) -> Setting:
    """The setting that a field's metadata describes."""
    facts = dict(field.metadata)
    facts["default_text"] = facts["default_text"] or facts["value_type"].show(field.default)
    return Setting(name=field.name, default=field.default, **facts)
