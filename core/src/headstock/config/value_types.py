"""Types of values: how each is read from text, a file or Python, and written back."""

from __future__ import annotations

import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from numbers import Real
from pathlib import PurePath

from attrs import field, frozen

from headstock.errors import shorten, suggest_name

INT32_MAX = 2**31 - 1
"""The largest count: lengths, pages and slots live in int32 tables."""

SWITCH_WORDS = {"on": True, "off": False, "1": True, "0": False, "true": True, "false": False}
"""How a switch, of a setting or of a plugin's option, is written."""

Value = (
    bool
    | int
    | float
    | str
    | tuple[str, ...]
    | tuple[int, ...]
    | Mapping[int, float]
    | Mapping[str, object]
    | None
)


class InvalidValue(Exception):
    """A value is not what its type takes; the text is "expected X, got Y"."""


def make_invalid(expected: str, raw: object) -> InvalidValue:
    """The error for a value that is not what was expected."""
    return InvalidValue(f"expected {expected}, got {shorten(raw)}")


class ValueType(ABC):
    """A type of value. `read` accepts its own results, so reading twice changes nothing."""

    @abstractmethod
    def read(self, raw: object) -> Value:
        """The value that `raw` stands for.   raises: InvalidValue"""

    @abstractmethod
    def describe(self) -> str:
        """What may be given, in a few words."""

    def show(self, value: Value) -> str:
        """The text that `read` turns into `value`."""
        return str(value)


@frozen(kw_only=True)
class Integer(ValueType):
    """A whole number between two limits.

    `word` is the text that leaves the number open, `unset` the value that stands for it.
    """

    least: int
    most: int = INT32_MAX
    word: str | None = None
    unset: str | None = None

    def read(self, raw: object) -> Value:
        if self.word is not None and (
            raw == self.unset or (isinstance(raw, str) and raw.strip().lower() == self.word)
        ):
            return self.unset
        value = self.parse_number(raw)
        if value < self.least:
            raise make_invalid(f"{self.least} or more", raw)
        if value > self.most:
            raise make_invalid(f"{self.most} or less", raw)
        return value

    def parse_number(self, raw: object) -> int:
        """`raw` as an integer.   raises: InvalidValue"""
        # numpy's integers have __index__ too; True would otherwise count as 1
        if not isinstance(raw, bool) and hasattr(raw, "__index__"):
            return operator.index(raw)
        # at most 4,000 digits: int() refuses longer texts with a different error
        if isinstance(raw, str) and re.fullmatch(r"[+-]?[0-9]{1,4000}", raw.strip()):
            return int(raw)
        raise make_invalid("a whole number" + (f" or '{self.word}'" if self.word else ""), raw)

    def describe(self) -> str:
        limits = (
            f", {self.least} or more"
            if self.most >= INT32_MAX
            else f" from {self.least} to {self.most}"
        )
        return f"N{limits if self.least > -INT32_MAX else ''}" + (
            f", or '{self.word}'" if self.word else ""
        )

    def show(self, value: Value) -> str:
        return str(self.word) if value == self.unset else str(value)


@frozen(kw_only=True)
class Number(ValueType):
    """A finite number in an interval, which `rule` describes; `above` excludes the lower limit.

    `word` is the text that leaves the number open; its value is None. With `auto` that text is a
    value too.
    """

    least: float
    most: float
    rule: str
    above: bool = False
    word: str | None = None
    auto: bool = False

    def read(self, raw: object) -> Value:
        if self.auto and isinstance(raw, str) and raw.strip().lower() == "auto":
            return "auto"
        if self.word is not None and (raw is None or raw == self.word):
            return None
        # True is a Real too, but a switch where a number belongs is a mistake.
        if isinstance(raw, bool) or not isinstance(raw, Real | str):
            raise make_invalid("a number", raw)
        try:
            value = float(raw)
        except (ValueError, OverflowError):
            raise make_invalid("a number", raw) from None
        # NaN fails every comparison, so it is refused here too
        if not (self.least <= value <= self.most) or (self.above and value == self.least):
            raise make_invalid(self.rule, raw)
        return value

    def describe(self) -> str:
        words = [repr(self.word)] if self.auto and self.word else []
        words += ["'auto'"] if self.auto else []
        return ", or ".join([f"X {self.rule.removeprefix('a number ')}", *words])

    def show(self, value: Value) -> str:
        return str(self.word) if value is None else str(value)


@frozen(kw_only=True)
class Choice(ValueType):
    """One of a few words. `spellings` are other ways to write them, in lower case."""

    names: tuple[str, ...]
    spellings: Mapping[str, str] = field(factory=dict)

    def read(self, raw: object) -> Value:
        if isinstance(raw, str):
            # Names are lower case (float32) or upper case (DEBUG), and other case is accepted.
            for text in (raw.strip(), raw.strip().lower(), raw.strip().upper()):
                name = self.spellings.get(text, text)
                if name in self.names:
                    return name
        hint = suggest_name(str(raw), self.names)
        raise make_invalid(f"one of {', '.join(self.names)}", f"{shorten(raw)}{hint}")

    def describe(self) -> str:
        return ", ".join(self.names)


@frozen(kw_only=True)
class Switch(ValueType):
    """On or off.

    `word` is the text that leaves it open; its value is None.
    """

    word: str | None = None

    def read(self, raw: object) -> Value:
        if isinstance(raw, bool):
            return raw
        if self.word is not None and (raw is None or raw == self.word):
            return None
        text = str(raw).strip().lower()
        if text not in SWITCH_WORDS:
            raise make_invalid(f"one of {self.describe()}", raw)
        return SWITCH_WORDS[text]

    def describe(self) -> str:
        return ", ".join([*SWITCH_WORDS, *([] if self.word is None else [self.word])])

    def show(self, value: Value) -> str:
        if value is None:
            return str(self.word)
        return "on" if value else "off"


@frozen(kw_only=True)
class Text(ValueType):
    """A text that is not empty and matches `pattern`, which `rule` describes.

    `word` is the text that leaves it open; its value is None.
    """

    pattern: str = r"(?s).*\S.*"
    rule: str = "a text that is not empty"
    form: str = "TEXT"
    word: str | None = None

    def read(self, raw: object) -> Value:
        if self.word is not None and (raw is None or raw == self.word):
            return None
        text = str(raw) if isinstance(raw, PurePath) else raw
        if not isinstance(text, str) or not text:
            raise make_invalid("a text that is not empty", repr(raw) if raw == "" else raw)
        if not re.fullmatch(self.pattern, text):
            raise make_invalid(self.rule, raw)
        return text

    def describe(self) -> str:
        return self.form + (f", or '{self.word}'" if self.word else "")

    def show(self, value: Value) -> str:
        return str(self.word) if value is None else str(value)


class Repeated(ValueType):
    """Several entries: a list or a table in a file or in Python, a flag that may be repeated."""

    @property
    @abstractmethod
    def form(self) -> str:
        """How one entry reads."""

    def describe(self) -> str:
        return f"{self.form}, may be repeated"


@frozen(kw_only=True)
class Texts(Repeated):
    """Several texts in order: a list in a file or Python, or a flag that may be repeated.

    A table stands for its entries, `key.inner=value`. With `spaced`, spaces separate texts.
    """

    item: Text
    spaced: bool

    def read(self, raw: object) -> Value:
        return tuple(str(self.item.read(part)) for part in self.split_texts(raw))

    def split_texts(self, raw: object) -> Iterable[object]:
        """The single texts in `raw`.   raises: InvalidValue"""
        if isinstance(raw, str):
            # An environment variable can hold several texts only within one.
            return raw.split() if self.spaced else [raw]
        if isinstance(raw, Mapping):
            return [
                f"{name}.{key}={entry}"
                for name, table in raw.items()
                for key, entry in _table_entries(table)
            ]
        if isinstance(raw, list | tuple):
            return raw
        raise make_invalid("a text or a list of texts", raw)

    @property
    def form(self) -> str:
        return self.item.form

    def show(self, value: Value) -> str:
        return " ".join(map(str, value)) if isinstance(value, tuple) else ""


def _table_entries(table: object) -> Iterable[tuple[str, object]]:
    """The keys and values of a table.   raises: InvalidValue when it is none"""
    if not isinstance(table, Mapping):
        raise make_invalid("tables of options, one table a plugin", table)
    return table.items()
