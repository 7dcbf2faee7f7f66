"""All settings under the names that files, the environment and Python keywords may use."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from attrs import frozen

from headstock.config.engine import EngineConfig
from headstock.config.equivalents import find_equivalent
from headstock.config.presets import PRESETS
from headstock.config.sampling import collect_sampling_settings
from headstock.config.setting import Setting, collect_settings, flag_to_key
from headstock.config.spelling import Spelling, Surface
from headstock.config.value_types import Text, Value, suggestion
from headstock.errors import UsageError, shorten

CONFIG = Setting(
    name="config",
    flag="--config",
    value_type=Text(form="FILE"),
    help="a file of settings: TOML, or by its ending JSON (.json) or YAML (.yaml, .yml)",
    aliases={},
    default=None,
    default_text="none",
    group="sources",
)
PRESET = Setting(
    name="preset",
    flag="--preset",
    value_type=Text(form="NAME"),
    help=f"a named set of values, below file and flags: {', '.join(PRESETS)}",
    aliases={},
    default=None,
    default_text="none",
    group="sources",
)


@frozen
class SettingName:
    """A name for a setting. `alias` is the other engine's flag behind it; `inverted` marks a
    switch's negative.
    """

    setting: Setting
    alias: str | None = None
    inverted: bool = False

    def read(self, raw: object, source_text: str, called: str) -> Value:
        """The setting's value that `raw` stands for under this name.   raises: UsageError"""
        value = self.setting.read(raw, source_text, called)
        return not value if self.inverted else value

    @property
    def note(self) -> str:
        """What the user should know of the alias; empty for a name that means the same
        everywhere.
        """
        return self.setting.aliases.get(self.alias, "") if self.alias else ""


@cache
def engine_settings() -> Mapping[str, Setting]:
    """The engine's settings by key."""
    return MappingProxyType(
        {setting.key: setting for setting in collect_settings(EngineConfig).values()}
    )


@cache
def sampling_settings() -> Mapping[str, Setting]:
    """The sampling settings by key, which is their name."""
    return MappingProxyType(collect_sampling_settings())


@cache
def setting_names() -> Mapping[str, SettingName]:
    """Every name that a file or the environment may use: keys, aliases, negatives of switches."""
    found: dict[str, SettingName] = {}
    for setting in (CONFIG, PRESET, *engine_settings().values(), *sampling_settings().values()):
        found[setting.key] = SettingName(setting)
        found |= {
            flag_to_key(alias): SettingName(setting, alias)
            for alias in setting.aliases
            if alias.startswith("--")
        }
        if setting.negative is not None:
            found[flag_to_key(setting.negative)] = SettingName(setting, inverted=True)
    return MappingProxyType(found)


@cache
def keyword_names() -> Mapping[str, SettingName]:
    """Every Python keyword: the engine's fields by their own names, then what else a file may use,
    without sampling.
    """
    fields = {
        field: SettingName(setting) for field, setting in collect_settings(EngineConfig).items()
    }
    others = {
        word: name
        for word, name in setting_names().items()
        if name.setting.key not in sampling_settings()
    }
    return MappingProxyType(others | fields)


def make_spelling(surface: Surface) -> Spelling:
    """How texts name the engine's settings on that surface."""
    settings = (CONFIG, PRESET, *engine_settings().values())
    own = {each.key: each.name if surface.keywords else each.flag for each in settings}
    used = {**own, **surface.names}
    return Spelling(
        value_types={each.flag: each.value_type for each in settings},
        negatives={each.negative: each.flag for each in settings if each.negative is not None},
        names={each.flag: used[each.key] for each in settings},
        keywords=surface.keywords,
    )


def find_setting_name(word: str, known: Mapping[str, SettingName], source_text: str) -> SettingName:
    """The name `word`, dashes or underscores.

    raises: UsageError with a suggestion; `source_text` is where it was found
    """
    word = word.replace("-", "_")
    if word not in known:
        equivalent = find_equivalent(word)
        hint = suggestion(shorten(word), known) if equivalent is None else f"; {equivalent}"
        raise UsageError(f"{source_text}: unknown setting '{shorten(word)}'{hint}")
    return known[word]
