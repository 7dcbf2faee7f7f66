"""How texts name settings: by flags, by Python keywords, or by the alias that was used."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from attrs import field, frozen

from headstock.config.setting import Setting
from headstock.config.source_settings import CONFIG, PRESET
from headstock.config.value_types import InvalidValue, Switch, Text, Texts, ValueType
from headstock.errors import HeadstockError

MENTION = re.compile(
    r"'(?:hf|headstock) [^']*'|(?<![\w-])(--[a-z][a-z-]*[a-z])(?:[ =]([^\s;:()']*[^\s;:(),.']))?"
)
"""A quoted command, or a flag and the word after it, which may be its value."""
NO_VALUES = frozenset("and as cannot for has in is it of or that the to wants with".split())
"""Words that follow a flag in a sentence and are not its value."""


@frozen(kw_only=True)
class Surface:
    """How an engine was configured: by `keywords` or by flags, and the names used, by key."""

    keywords: bool = True
    names: Mapping[str, str] = field(factory=dict)


@frozen(kw_only=True)
class Spelling:
    """Renders texts that name settings by flags with the names that the user knows.

    - `value_types`: flag -> type of its value
    - `negatives`: flag that turns a switch off -> the switch's flag
    - `names`: flag -> keyword, or the name that was used
    """

    value_types: Mapping[str, ValueType]
    negatives: Mapping[str, str]
    names: Mapping[str, str] = field(factory=dict)
    keywords: bool = True

    def render(self, text: str) -> str:
        """`text` with each setting under its name here.

        Other flags stay, and so do quoted commands, which are to be typed as they are.
        """
        return MENTION.sub(self._render_mention, text)

    @contextmanager
    def render_errors(self) -> Iterator[None]:
        """Render the texts of HeadstockErrors that leave this block."""
        try:
            yield
        except HeadstockError as error:
            error.args = (self.render(str(error)), *error.args[1:])
            raise

    def _render_mention(self, mention: re.Match[str]) -> str:
        """One setting's name, with the value beside it."""
        # Core writes all texts with flags, as it does not know how its caller names settings.
        flag, word = mention[1], mention[2]
        if flag is None:  # a quoted command, to be typed as it is
            return mention[0]
        rest = mention[0].removeprefix(flag)
        if flag in self.negatives and self.keywords:
            return f"{self.names[self.negatives[flag]]}=False{rest}"
        if flag not in self.value_types:
            return mention[0]
        name, value_type = self.names.get(flag, flag), self.value_types[flag]
        if not self.keywords:
            return name + rest
        if word is not None and _is_value(word, value_type):
            return f"{name}={_format_literal(word, value_type)}"
        truth = "=True" if isinstance(value_type, Switch) else ""
        return f"{name}{truth}{rest}"


def make_spelling(surface: Surface, settings: Iterable[Setting]) -> Spelling:
    """How texts name the engine's `settings`, and the two that name sources, on that surface."""
    known_settings = (CONFIG, PRESET, *settings)
    own_names = {
        setting.key: setting.name if surface.keywords else setting.flag
        for setting in known_settings
    }
    used_names = {**own_names, **surface.names}
    return Spelling(
        value_types={setting.flag: setting.value_type for setting in known_settings},
        negatives={
            setting.negative: setting.flag
            for setting in known_settings
            if setting.negative is not None
        },
        names={setting.flag: used_names[setting.key] for setting in known_settings},
        keywords=surface.keywords,
    )


def name_parameters(text: str, names: Mapping[str, str]) -> str:
    """`text` with sampling parameters under `names`: its first word, and words with "_".

    What comes before the first word may be the entry of a list, as in "prompts[3]: ".
    """
    entry = re.match(r"(\w+)(\[\d+\]: )", text)
    if entry is not None:
        rest = name_parameters(text[entry.end() :], names)
        return f"{names.get(entry[1], entry[1])}{entry[2]}{rest}"
    # A message begins with the parameter. Later only words with "_" surely are parameters: "n" or
    # "stop" may be plain words.
    first, space, rest = text.partition(" ")
    name = first.removesuffix(":")
    words = re.sub(
        r"(?<![\w.-])[a-z]+(?:_[a-z]+)+(?![\w-])", lambda word: names.get(word[0], word[0]), rest
    )
    return f"{names.get(name, name)}{first[len(name) :]}{space}{words}"


def _is_value(word: str, value_type: ValueType) -> bool:
    """Whether the word after a flag is its value, and not the next word of the sentence."""
    # Any word could be a text's value, so the words of sentences are listed; other types can tell.
    if isinstance(value_type, Text | Texts):
        return word not in NO_VALUES
    try:
        value_type.read(word)
    except InvalidValue:
        return False
    return True


def _format_literal(word: str, value_type: ValueType) -> str:
    """A value as Python writes it."""
    if isinstance(value_type, Switch):
        return str(value_type.read(word))
    try:
        float(word)
    except ValueError:
        return f'"{word}"'
    return word
