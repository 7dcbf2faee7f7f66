"""JSON as a model writes it, read character by character without being checked."""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum

from headstock.spi import ToolEvent, ToolEventKind

WHITESPACE = frozenset(" \t\r\n")


class Reading(Enum):
    """What a character was to a reader.

    PART: a part, and more must come
    LAST: the last part
    BEYOND: no part; what came before is complete
    BROKEN: no part, and what came before is not as it should be
    """

    PART = 0
    LAST = 1
    BEYOND = 2
    BROKEN = 3


class ValueScanner:
    """Finds the end of one JSON value, which begins with the first character."""

    # By brackets and quotes alone: arguments go out as they come, right or wrong, so there is
    # nothing to gain from a check.

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self.is_escaped = False
        self.is_scalar = False

    def add(self, char: str) -> Reading:
        """What `char` is to the value; never BROKEN."""
        if self.in_string:
            if self.is_escaped:
                self.is_escaped = False
            elif char == "\\":
                self.is_escaped = True
            elif char == '"':
                self.in_string = False
                return Reading.PART if self.depth else Reading.LAST
        elif self.is_scalar:
            return Reading.BEYOND if char in ",]}" or char in WHITESPACE else Reading.PART
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1
            return Reading.PART if self.depth > 0 else Reading.LAST
        elif not self.depth:
            self.is_scalar = True
        return Reading.PART


class CallReader:
    """Reads one call: a JSON object with a name, and arguments under one of `argument_keys`.

    With `names`, an object with another name is no call.
    """

    def __init__(self, argument_keys: tuple[str, ...], names: Collection[str] | None = None):
        self.argument_keys = argument_keys
        self.names = names
        self.events: list[ToolEvent] = []
        self.is_call = False
        self._held: list[str] = []  # arguments that came before the name
        self._has_arguments = False
        self._are_arguments_whole = False
        self._streams = False  # the value that is read goes out as it comes
        self._key = ""
        self._text: list[str] = []
        self._scanner: ValueScanner | None = None
        self._expected = "{"  # one of { (an object), k (a key), :, v (a value) and , (the next)

    def add(self, char: str) -> Reading:
        """What `char` is to the call; never BEYOND."""
        if self._scanner is not None:
            reading = self._scanner.add(char)
            if reading is not Reading.BEYOND:
                self._add_value(char)
            if reading is Reading.PART:
                return reading
            self._scanner = None
            if not self._end_value():
                return Reading.BROKEN
            if reading is Reading.LAST:
                return Reading.PART
        if char in WHITESPACE:
            return Reading.PART
        match self._expected, char:
            case "{", "{":
                self._expected = "k"
            case "k", '"':
                self._begin_value(char)
            case (("k" | ","), "}"):
                return self._end_call()
            case ":", ":":
                self._expected = "v"
            case "v", _ if char not in ",]}:":
                return self._begin_argument(char)
            case ",", ",":
                self._expected = "k"
            case _:
                return Reading.BROKEN
        return Reading.PART

    def _begin_value(self, char: str) -> None:
        self._scanner, self._text = ValueScanner(), []
        self._scanner.add(char)
        self._add_value(char)

    def _add_value(self, char: str) -> None:
        if self._streams:
            (self._text if self.is_call else self._held).append(char)
            # One event a character would be dear: `take_events` joins them.
        else:
            self._text.append(char)

    def _begin_argument(self, char: str) -> Reading:
        """Begin the value of a key."""
        if self._key in self.argument_keys:
            if self._has_arguments or char not in '{"n':
                return Reading.BROKEN
            self._has_arguments = True
            self._streams = char == "{"
        self._begin_value(char)
        return Reading.PART

    def _end_value(self) -> bool:
        """Take in a whole key or value; False when it is not as it should be."""
        if self._expected == "k":
            key = _read_string(self._text)
            self._expected = ":"
            self._key = key or ""
            return key is not None
        self._expected = ","
        if self._streams:
            self._flush_arguments()
            self._streams, self._are_arguments_whole = False, True
            return True
        if self._key == "name":
            return self._begin_call(_read_string(self._text))
        if self._key in self.argument_keys:
            return self._add_spelt_arguments("".join(self._text))
        return True

    def _begin_call(self, name: str | None) -> bool:
        if self.is_call or not name or (self.names is not None and name not in self.names):
            return False
        self.is_call = True
        self.events.append(ToolEvent(ToolEventKind.CALL, name))
        self._emit(self._held)
        return True

    def _add_spelt_arguments(self, text: str) -> bool:
        """Arguments that are null, or JSON in a string."""
        arguments = "{}" if text == "null" else _read_string(list(text))
        if arguments is None or not arguments.lstrip().startswith("{"):
            return False
        self._emit([arguments]) if self.is_call else self._held.append(arguments)
        self._are_arguments_whole = True
        return True

    def _end_call(self) -> Reading:
        if not self.is_call:
            return Reading.BROKEN
        if not self._has_arguments:
            self._emit(["{}"])
        self.events.append(ToolEvent(ToolEventKind.END))
        return Reading.LAST

    def end_early(self) -> bool:
        """End a call that broke off behind its arguments; False where they are not whole."""
        return self.is_call and self._are_arguments_whole and self._end_call() is Reading.LAST

    def _flush_arguments(self) -> None:
        if self.is_call:
            self._emit(self._text)
            self._text = []

    def _emit(self, texts: list[str]) -> None:
        if texts:
            self.events.append(ToolEvent(ToolEventKind.ARGUMENTS, "".join(texts)))

    def take_events(self) -> list[ToolEvent]:
        """The events since the last time."""
        if self._streams:
            self._flush_arguments()
        events, self.events = self.events, []
        return events


def _read_string(text: list[str]) -> str | None:
    """The string that JSON text spells; None when it spells none."""
    try:
        value = json.loads("".join(text), strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
