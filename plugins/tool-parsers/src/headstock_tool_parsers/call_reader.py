"""A call that a model writes as JSON, read character by character."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Final

from headstock.spi import ToolEvent, ToolEventKind
from headstock_tool_parsers.json_reader import WHITESPACE, JsonReader, Reading, spell_json

NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
"""Names that a request can give its tools."""

NOTES: Final = ("id", "index", "type")
"""Keys of a call besides its name and arguments."""


class CallReader:
    """Reads one call: a JSON object with a name, and arguments under one of `argument_keys`, or
    such an object as the member "function" of another.

    An object is a call once its name is complete and its first argument begins correctly. It is not
    a call if its name is not in `names`, or if it has other members, except one before its
    arguments. With `name`, only the arguments are read.

    is_call: whether events were emitted
    num_held: characters at the end of those read without an event
    """

    def __init__(
        self,
        argument_keys: tuple[str, ...] = (),
        names: Collection[str] | None = None,
        *,
        name: str = "",
    ) -> None:
        self.argument_keys = argument_keys
        self.names = names
        self.is_call = False
        self.num_held = 0
        self._name = name
        self._is_bare = bool(name)
        self._events: list[ToolEvent] = []
        self._arguments: list[str] = []  # text without an event yet
        self._has_arguments = self._are_arguments_whole = False
        self._streams = False  # the current value is emitted as it arrives
        self._num_others = 0  # values of other keys
        self._is_nested = False  # in the object under "function"
        self._key = ""
        self._value: JsonReader | None = None
        # {, K (the first key), k (a key), :, v (a value) and , (the next)
        self._expected = "{"
        if name:
            self._has_arguments = self._streams = True
            self._value = JsonReader()

    def add(self, char: str) -> Reading:
        """The role of `char` in the call; never BEYOND."""
        self.num_held += 1
        reading = self._add(char)
        if reading is Reading.BROKEN:  # `char` is not a part; text before it may have been emitted
            self.num_held = max(self.num_held - 1, 0)
        return reading

    def _add(self, char: str) -> Reading:
        if self._value is not None:
            reading = self._value.add(char)
            self._pass_on(self._value)
            if reading in (Reading.PART, Reading.BROKEN):
                return reading
            value, self._value = self._value, None
            if not self._end_value(value):
                return Reading.BROKEN
            if reading is Reading.LAST:
                return self._end_call() if self._is_bare else Reading.PART
        if char in WHITESPACE:
            return Reading.PART
        match self._expected, char:
            case "{", "{":
                self._expected = "K"
            case "K", "{":  # some templates show their example in double brackets
                self._expected = "k"
            case (("K" | "k"), '"'):
                self._expected = "k"
                self._value = JsonReader()
                return self._value.add(char)
            case (("K" | "k" | ","), "}"):
                return self._end_object()
            case ":", ":":
                self._expected = "v"
            case "v", _:
                return self._begin_member(char)
            case ",", ",":
                self._expected = "k"
            case _:
                return Reading.BROKEN
        return Reading.PART

    def _pass_on(self, value: JsonReader) -> None:
        """Emit the certain part of the arguments."""
        if not self._streams:
            return
        if text := value.take_text():
            self._arguments.append(text)
            if self.is_call:
                self.num_held = value.num_held
        if self._name and value.has_value and not self.is_call:
            self._begin_call()
            self.num_held = value.num_held

    def _begin_member(self, char: str) -> Reading:
        """The first character of a value."""
        self._value = JsonReader()
        if self._key in self.argument_keys:
            if self._has_arguments or char not in '{"n':
                return Reading.BROKEN
            self._has_arguments = True
            self._streams = char == "{"
        elif self._key == "name":
            if self._name or char != '"':
                return Reading.BROKEN
        elif self._key == "function" and char == "{" and not self._is_nested:
            self._is_nested, self._value, self._expected = True, None, "k"
            return Reading.PART
        elif self._key not in NOTES and not self._has_arguments:
            self._num_others += 1
            if self._num_others > 1:
                return Reading.BROKEN
        return self._value.add(char)

    def _end_value(self, value: JsonReader) -> bool:
        """Accept a whole key or value; False if it is invalid."""
        if self._streams:
            self._streams, self._are_arguments_whole = False, True
            self._expected = ","
            return True
        text = value.take_text().strip()
        if self._expected == "k":
            self._key = json.loads(text)
            self._expected = ":"
            return True
        self._expected = ","
        if self._key == "name":
            self._name = json.loads(text)
            is_offered = self.names is None or self._name in self.names
            if not is_offered or not NAME.fullmatch(self._name):
                self._name = ""
                return False
            if self._are_arguments_whole:
                self._begin_call()
            return True
        if self._key in self.argument_keys:
            return self._add_spelt_arguments(text)
        return True

    def _add_spelt_arguments(self, text: str) -> bool:
        """Arguments that are null, or JSON in a string."""
        arguments = "{}" if text == "null" else spell_json(json.loads(text))
        if arguments is None or not arguments.startswith("{"):
            return False
        self._arguments.append(arguments)
        self._are_arguments_whole = True
        if self._name:
            self._begin_call()
        return True

    def _begin_call(self) -> None:
        """Emit the name, once."""
        if not self.is_call:
            self.is_call = True
            self._events.append(ToolEvent(ToolEventKind.CALL, self._name))
        self.num_held = 0

    def _end_object(self) -> Reading:
        if self._is_nested:
            self._is_nested = False
            self._expected = ","
            return Reading.PART
        return self._end_call()

    def _end_call(self) -> Reading:
        if not self._has_name:
            return Reading.BROKEN
        self._begin_call()
        if not self._has_arguments:
            self._arguments.append("{}")
        self._flush()
        self._events.append(ToolEvent(ToolEventKind.END))
        return Reading.LAST

    @property
    def is_behind_argument(self) -> bool:
        """Whether an argument is complete, and the brackets around it are open."""
        return self._streams and self._value is not None and self._value.is_behind_value

    def end_arguments(self) -> None:
        """Close the missing brackets around an argument."""
        value = self._value
        assert value is not None, "internal error: no argument is read"
        value.close_all()
        self._pass_on(value)
        self._end_value(value)

    def end_early(self) -> bool:
        """End a call that was cut off after its arguments; False if they are incomplete."""
        num_held = self.num_held
        is_whole = bool(self._name) and self._are_arguments_whole
        if is_whole:
            self._end_call()
            self.num_held = num_held
        return is_whole

    def break_off(self) -> bool:
        """Emit the rest of a call at the end of the text; False if it is not a call."""
        if not self._has_name or (self._value is not None and not self._value.break_off()):
            return False
        self._begin_call()
        if self._value is not None:
            self._pass_on(self._value)
        return True

    @property
    def _has_name(self) -> bool:
        """Whether the name is complete, and there is no argument under an unknown key."""
        return bool(self._name) and (self._has_arguments or not self._num_others)

    def take_events(self) -> list[ToolEvent]:
        """The events since the last time."""
        self._flush()
        events, self._events = self._events, []
        return events

    def _flush(self) -> None:
        # One event per character would be expensive.
        if self.is_call and self._arguments:
            self._events.append(ToolEvent(ToolEventKind.ARGUMENTS, "".join(self._arguments)))
            self._arguments.clear()
