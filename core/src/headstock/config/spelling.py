"""How texts name settings: by flags on the command line, by keywords in Python, under the name that
was used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from attrs import field, frozen

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
    """Where an engine was configured: by `keywords` or by flags, and the names that were used, by
    key.
    """

    keywords: bool = True
    names: Mapping[str, str] = field(factory=dict)


@frozen(kw_only=True)
class Spelling:
    """Puts texts that name settings by their flags into the words of whoever configured the engine.

    `value_types` maps each flag to the type of its values, `negatives` the flags that turn
    switches off; `names` has the keyword of each flag, or the name that was used in place of it.
    """

    value_types: Mapping[str, ValueType]
    negatives: Mapping[str, str]
    names: Mapping[str, str] = field(factory=dict)
    keywords: bool = True

    def render(self, text: str) -> str:
        """The text with each setting under its name here; other flags, and commands to be typed,
        stay.
        """
        return MENTION.sub(self._render_mention, text)

    @contextmanager
    def render_errors(self) -> Iterator[None]:
        """Errors that leave this block name settings in this way."""
        try:
            yield
        except HeadstockError as error:
            error.args = (self.render(str(error)), *error.args[1:])
            raise

    def _render_mention(self, found: re.Match[str]) -> str:
        """One setting's name, with the value that is given beside it."""
        flag, word = found[1], found[2]
        if flag is None:
            return found[0]
        if flag in self.negatives and self.keywords:
            rest = found[0].removeprefix(flag)
            return f"{self.names[self.negatives[flag]]}=False{rest}"
        if flag not in self.value_types:
            return found[0]
        name, value_type = self.names.get(flag, flag), self.value_types[flag]
        if not self.keywords:
            return name + found[0].removeprefix(flag)
        if word is not None and is_value(word, value_type):
            return f"{name}={format_literal(word, value_type)}"
        truth = "=True" if isinstance(value_type, Switch) else ""
        return f"{name}{truth}{found[0].removeprefix(flag)}"


def name_parameters(text: str, names: Mapping[str, str]) -> str:
    """An error's text with sampling parameters under the names that were used: its first word, and
    words with "_".
    """
    first, space, rest = text.partition(" ")
    words = re.sub(
        r"(?<![\w.-])[a-z]+(?:_[a-z]+)+(?![\w-])", lambda found: names.get(found[0], found[0]), rest
    )
    return f"{names.get(first, first)}{space}{words}"


def is_value(word: str, value_type: ValueType) -> bool:
    """Whether a word behind a flag is its value and not the sentence going on."""
    if isinstance(value_type, Text | Texts):
        return word not in NO_VALUES
    try:
        value_type.read(word)
    except InvalidValue:
        return False
    return True


def format_literal(word: str, value_type: ValueType) -> str:
    """A value as Python writes it."""
    if isinstance(value_type, Switch):
        return str(value_type.read(word))
    try:
        float(word)
    except ValueError:
        return f'"{word}"'
    return word
