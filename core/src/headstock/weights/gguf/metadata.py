"""Read values of a GGUF header by their keys."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import TypeVar

from attrs import frozen

from headstock.errors import shorten
from headstock.weights.gguf.header import HeaderError

_T = TypeVar("_T")


@frozen
class Metadata:
    """The values of a header.

    Each reader returns None for a key that is missing, and raises HeaderError for a value of
    another kind.
    """

    values: Mapping[str, object]

    def find_text(self, key: str) -> str | None:
        """A text."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise _make_error(key, "a text", value)
        return value

    def find_flag(self, key: str) -> bool | None:
        """True or false."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise _make_error(key, "true or false", value)
        return value

    def find_number(self, key: str) -> float | None:
        """A number."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _make_error(key, "a number", value)
        return _round_single(float(value))

    def find_count(self, key: str) -> int | None:
        """A whole number, not below 0.

        A list with one such number for each layer is that number, where all are the same.
        """
        value = self.values.get(key)
        if isinstance(value, array) and len(set(value)) == 1:
            value = value[0]
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise _make_error(key, "a whole number, not below 0, for all layers", value)
        return value

    def find_size(self, key: str) -> int | None:
        """A whole number above 0."""
        count = self.find_count(key)
        if count == 0:
            raise _make_error(key, "a whole number above 0", count)
        return count

    def find_texts(self, key: str) -> Sequence[str] | None:
        """A list of texts."""
        value = self.values.get(key)
        # An empty list may be of any type.
        if isinstance(value, array) and not value:
            return ()
        if value is not None and not isinstance(value, tuple):
            raise _make_error(key, "a list of texts", value)
        return value

    def find_numbers(self, key: str) -> Sequence[float] | None:
        """A list of numbers."""
        value = self.values.get(key)
        if value == ():
            return ()
        if value is not None and not isinstance(value, array):
            raise _make_error(key, "a list of numbers", value)
        return value

    def read_text(self, key: str) -> str:
        """A text that must be there."""
        return _require(key, self.find_text(key))

    def read_number(self, key: str) -> float:
        """A number that must be there."""
        return _require(key, self.find_number(key))

    def read_count(self, key: str) -> int:
        """A whole number above 0 that must be there."""
        return _require(key, self.find_size(key))


def _round_single(number: float) -> float:
    """The shortest number that is the same in single precision, where the number has no more."""
    # Files store 1e-6 so, and a config.json says that and not 9.999999974752427e-07.
    try:
        stored = struct.pack("<f", number)
    except OverflowError:
        return number
    if struct.unpack("<f", stored)[0] != number:
        return number
    candidates = (float(f"{number:.{digits}g}") for digits in range(6, 9))
    return next((each for each in candidates if struct.pack("<f", each) == stored), number)


def _require(key: str, value: _T | None) -> _T:
    """The value.   raises: HeaderError without one"""
    if value is None:
        raise HeaderError(f"{key} is missing, without which the model is not known")
    return value


def _make_error(key: str, wanted: str, value: object) -> HeaderError:
    """The error for a value of another kind."""
    got = f"a list of {len(value)}" if isinstance(value, array | tuple) else shorten(repr(value))
    return HeaderError(f"{shorten(key)}: expected {wanted}, got {got}")
