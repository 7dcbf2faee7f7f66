"""All settings under the names that files, the environment and Python keywords may use."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from attrs import frozen

from headstock.config.engine import SETTINGS
from headstock.config.equivalents import find_equivalent
from headstock.config.sampling import collect_sampling_settings
from headstock.config.setting import Setting, flag_to_key
from headstock.config.source_settings import CONFIG, PRESET
from headstock.config.value_types import Value
from headstock.errors import NotSupported, UsageError, name_setting, shorten, suggest_name


@frozen
class SettingName:
    """A name for a setting.

    `alias` is the other engine's flag behind the name; `inverted` marks the negative of a switch.
    """

    setting: Setting
    alias: str | None = None
    inverted: bool = False

    def read(self, raw: object, where: str) -> Value:
        """The setting's value that `raw` stands for under this name.

        raises: UsageError, which begins with `where` the value was given
        """
        value = self.setting.read(raw, where)
        return not value if self.inverted else value

    @property
    def flag(self) -> str:
        """The long flag of this name."""
        if self.inverted and self.setting.negative is not None:
            return self.setting.negative
        # A short flag such as -m says nothing to who reads a message.
        is_long = self.alias is not None and self.alias.startswith("--")
        return self.alias if is_long and self.alias is not None else self.setting.flag

    @property
    def label(self) -> str:
        """The name in messages, for Python and the command line alike."""
        is_own = self.flag == self.setting.flag
        return self.setting.label if is_own else name_setting(flag_to_key(self.flag), self.flag)

    @property
    def note(self) -> str:
        """What the alias means in another engine; empty for a name that means the same there."""
        return self.setting.aliases.get(self.alias, "") if self.alias else ""


@cache
def engine_settings() -> Mapping[str, Setting]:
    """The engine's settings by key."""
    return MappingProxyType({setting.key: setting for setting in SETTINGS.values()})


@cache
def sampling_settings() -> Mapping[str, Setting]:
    """The sampling settings by key, which is their name."""
    return MappingProxyType(collect_sampling_settings())


@cache
def setting_names() -> Mapping[str, SettingName]:
    """Every name that a file or the environment may use: keys, aliases, negatives of switches."""
    names: dict[str, SettingName] = {}
    for setting in (CONFIG, PRESET, *engine_settings().values(), *sampling_settings().values()):
        names[setting.key] = SettingName(setting)
        # a short flag such as -m is not a key of a file
        names |= {
            flag_to_key(alias): SettingName(setting, alias)
            for alias in setting.aliases
            if alias.startswith("--")
        }
        if setting.negative is not None:
            names[flag_to_key(setting.negative)] = SettingName(setting, inverted=True)
    return MappingProxyType(names)


@cache
def keyword_names() -> Mapping[str, SettingName]:
    """Every Python keyword: the fields of EngineConfig, and a file's names without sampling."""
    fields = {field: SettingName(setting) for field, setting in SETTINGS.items()}
    others = {
        word: name
        for word, name in setting_names().items()
        if name.setting.key not in sampling_settings()
    }
    # Fields come last and win: `seed` is the engine's in Python, a sampling value in a file.
    return MappingProxyType(others | fields)


def find_setting_name(word: str, names: Mapping[str, SettingName], source_text: str) -> SettingName:
    """The one of `names` that `word` spells, with dashes or underscores.

    raises: UsageError with a suggestion, which begins with `source_text`
    """
    # Users copy flags into files, with their dashes.
    word = word.replace("-", "_")
    if word not in names:
        equivalent = find_equivalent(word)
        if equivalent is not None:
            # A keyword's text has its name, a file's has not.
            named = source_text if word in source_text else f"{source_text}: {word}"
            raise NotSupported(f"{named} is not supported; {equivalent}")
        hint = suggest_name(shorten(word), names)
        raise UsageError(f"{source_text}: unknown setting '{shorten(word)}'{hint}")
    return names[word]
