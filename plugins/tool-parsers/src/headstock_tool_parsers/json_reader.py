"""Read JSON as models write it, character by character, and write it as valid JSON."""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import Final

WHITESPACE: Final = " \t\r\n"
MAX_DEPTH: Final = 127
"""Objects and lists within each other; the readers of many clients give up at 128."""

MAX_WORD: Final = 1000
"""Characters of a number; Python reads none of more than 4,300 digits."""

NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
NUMBER_START: Final = re.compile(r"-?((0|[1-9][0-9]*)((\.[0-9]+)?([eE]([+-]?[0-9]*)?)?|\.)?)?")
WORD: Final = re.compile(r"[A-Za-z0-9+.-]")
WORDS: Final = {
    "true": "true",
    "false": "false",
    "null": "null",
    # as Python spells them
    "True": "true",
    "False": "false",
    "None": "null",
}


class Reading(Enum):
    """The role of a character for a reader.

    PART: a part, and more must come
    LAST: the last part
    BEYOND: not a part; the text before is complete
    BROKEN: not a part, and the text before is invalid
    """

    PART = 0
    LAST = 1
    BEYOND = 2
    BROKEN = 3


class JsonReader:
    """Reads one value, and writes it as JSON: its output is always the beginning of a JSON text.

    Models make unambiguous mistakes. Raw line breaks in strings, a comma before a closing bracket,
    a closing bracket left out before another, one of a list too many, a backslash that begins no
    escape, and `True`, `False` and `None` are read. With `quotes` of both kinds, strings may be
    quoted as in Python.

    num_held: characters at the end of those read that are not in the output yet
    has_value: whether the value, or the first one within it, has begun as it should
    """

    def __init__(self, quotes: str = '"') -> None:
        self.num_held = 0
        self.has_value = False
        self._quotes = quotes
        self._quote = ""  # of the string that is read
        self._escape = ""  # what was read of an escape, with its backslash
        self._word = ""  # what was read of a number or a name such as true
        self._closers: list[str] = []  # of the objects and lists that are open
        self._is_key = False  # whether the string that is read, or may begin, is a key
        self._expected = "v"  # v (a value), k (a key), :, or , (the next)
        self._may_close = False  # right after an opening bracket or a comma
        self._comma = ""  # with the white space behind it; goes out with the next key or value
        self._spelled: list[str] = []

    def take_text(self) -> str:
        """The output since the last call."""
        text = "".join(self._spelled)
        self._spelled.clear()
        return text

    def add(self, char: str) -> Reading:
        """The role of `char` in the value."""
        if self._quote:
            return self._add_to_string(char)
        if self._word:
            if WORD.match(char):
                if len(self._word) == MAX_WORD:
                    return Reading.BROKEN
                self._word += char
                self.num_held += 1
                return Reading.PART
            if not self._end_word():
                return Reading.BROKEN
            if not self._closers:
                return Reading.BEYOND
        if char in WHITESPACE:
            if self._comma:
                self._comma += char
                self.num_held += 1
            else:
                self._spell(char)
            return Reading.PART
        return self._add_mark(char)

    def break_off(self) -> bool:
        """Write the held number or word at the end of the text; False if it is invalid."""
        word = self._word
        if NUMBER_START.fullmatch(word) or any(
            name.startswith(word) for name in ("true", "false", "null")
        ):
            if word:
                self._spell(self._comma + word)
            return True
        return any(name.startswith(word) for name in WORDS)

    @property
    def is_behind_value(self) -> bool:
        """Whether a value is complete, and no other one has begun."""
        return not self._word and (self._expected == "," or bool(self._comma))

    def close_all(self) -> None:
        """Close all brackets at the end of the text."""
        while self._closers:
            self._close(self._closers[-1])

    def _spell(self, text: str) -> None:
        self._spelled.append(text)
        self.num_held = 0

    def _add_mark(self, char: str) -> Reading:
        """A character outside of strings and words."""
        if char in "}]" and char in self._closers:
            if self.is_behind_value or (self._may_close and char == self._closers[-1]):
                return self._close(char)
            return Reading.BROKEN
        if char == "]" and self._expected == "," and self._closers:
            self.num_held += 1  # one too many
            return Reading.PART
        if self._expected == ":" and char == ":":
            self._spell(char)
            self._expected = "v"
            return Reading.PART
        if self._expected == "," and char == "," and self._closers:
            self._comma = char
            self.num_held = 1
            self._expected = "k" if self._closers[-1] == "}" else "v"
            self._may_close = True
            return Reading.PART
        if self._expected in "kv" and char in self._quotes:
            self._quote, self._is_key = char, self._expected == "k"
            self._spell_next('"')
            self.has_value = self.has_value or not self._is_key
            return Reading.PART
        if self._expected != "v":
            return Reading.BROKEN
        return self._open(char)

    def _open(self, char: str) -> Reading:
        """Begin an object, a list, a number or a word."""
        if char in "{[":
            if len(self._closers) == MAX_DEPTH:
                return Reading.BROKEN
            self.has_value = self.has_value or bool(self._closers)
            self._spell_next(char)
            self._closers.append("}" if char == "{" else "]")
            self._expected = "k" if char == "{" else "v"
            self._may_close = True
            return Reading.PART
        if not WORD.match(char):
            return Reading.BROKEN
        self._word = char
        self.num_held += 1
        return Reading.PART

    def _spell_next(self, text: str) -> None:
        """Write the beginning of a key or value, with the comma before it."""
        comma, self._comma = self._comma, ""
        self._may_close = False
        self._spell(comma + text)

    def _end_word(self) -> bool:
        """Write a whole number or word; False if it is invalid."""
        word = self._word
        spelled = word if NUMBER.fullmatch(word) else WORDS.get(word)
        if spelled is None:
            return False
        self._word = ""
        self._spell_next(spelled)
        self.has_value = True
        self._expected = ","
        return True

    def _close(self, char: str) -> Reading:
        """Close the brackets that this one closes, and all inside them."""
        self._comma = closer = ""
        while closer != char:
            closer = self._closers.pop()
            self._spell_next(closer)
        self.has_value = True
        self._expected = ","
        return Reading.PART if self._closers else Reading.LAST

    def _add_to_string(self, char: str) -> Reading:
        if self._escape:
            return self._add_to_escape(char)
        if char == self._quote:
            self._spell('"')
            self._quote = ""
            self._expected = ":" if self._is_key else ","
            return Reading.PART if self._closers else Reading.LAST
        if char == "\\":
            self._escape = char
            self.num_held = 1
        else:
            self._spell(spell_char(char))
        return Reading.PART

    def _add_to_escape(self, char: str) -> Reading:
        if self._escape == "\\" and char != "u":
            self._escape = ""
            if char in '"\\/bfnrt':
                self._spell("\\" + char)
                return Reading.PART
            if char == "'":
                self._spell(char)
                return Reading.PART
        elif self._escape == "\\" or char in "0123456789abcdefABCDEF":
            self._escape += char
            self.num_held += 1
            if len(self._escape) == len("\\u0000"):
                self._spell(self._escape)
                self._escape = ""
            return Reading.PART
        # A backslash that begins no escape stands for itself.
        self._spell("\\" + (self._escape or "\\"))
        self._escape = ""
        return self._add_to_string(char)


def spell_char(char: str) -> str:
    """A character within a JSON string."""
    if char == '"' or char < " " or "\ud800" <= char <= "\udfff":
        return json.dumps(char)[1:-1]
    return char


def spell_json(text: str, quotes: str = '"') -> str | None:
    """The JSON value of `text`; None if it is not one whole value."""
    reader = JsonReader(quotes)
    text = text.strip(WHITESPACE)
    for position, char in enumerate(text, start=1):
        reading = reader.add(char)
        if reading is Reading.LAST:
            return reader.take_text() if position == len(text) else None
        if reading is not Reading.PART:
            return None
    # A number or a word ends with the text.
    if text and reader.add(" ") is Reading.BEYOND:
        return reader.take_text()
    return None
