"""How texts name settings: by flags on the command line, by keywords in Python, under the name that
was used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from attrs import field, frozen

from headstock.config.value_types import Invalid, Kind, Switch, Text, Texts
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

    `kinds` has each setting's flag and the kind of its values, `negatives` the flags that turn
    switches off; `names` has the keyword of each flag, or the name that was used in place of it.
    """

    kinds: Mapping[str, Kind]
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
        if flag not in self.kinds:
            return found[0]
        name, kind = self.names.get(flag, flag), self.kinds[flag]
        if not self.keywords:
            return name + found[0].removeprefix(flag)
        if word is not None and is_value(word, kind):
            return f"{name}={literal(word, kind)}"
        return f"{name}{'=True' if isinstance(kind, Switch) else ''}{found[0].removeprefix(flag)}"


def name_parameters(text: str, names: Mapping[str, str]) -> str:
    """An error's text with sampling parameters under the names that were used: its first word, and
    words with "_".
    """
    first, space, rest = text.partition(" ")
    words = re.sub(
        r"(?<![\w.-])[a-z]+(?:_[a-z]+)+(?![\w-])", lambda found: names.get(found[0], found[0]), rest
    )
    return f"{names.get(first, first)}{space}{words}"


def is_value(word: str, kind: Kind) -> bool:
    """Whether a word behind a flag is its value and not the sentence going on."""
    if isinstance(kind, Text | Texts):
        return word not in NO_VALUES
    try:
        kind.read(word)
    except Invalid:
        return False
    return True


def literal(word: str, kind: Kind) -> str:
    """A value as Python writes it."""
    if isinstance(kind, Switch):
        return str(kind.read(word))
    try:
        float(word)
    except ValueError:
        return f'"{word}"'
    return word
