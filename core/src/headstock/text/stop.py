"""Stop strings, matched across the borders of tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from attrs import frozen

MARKS: Final = 0xD800
"""The first of the characters that stand for special tokens: halves of surrogate pairs, which no
decoded text holds.
"""


@frozen
class StopMatch:
    """Text that may go out, and the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


def count_partial(text: str, marks: Sequence[str]) -> int:
    """The characters at the end of `text` that may begin one of `marks`, at most."""
    for length in range(min(len(text), max(map(len, marks)) - 1), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks if len(mark) > length):
            return length
    return 0


def find_first(text: str, marks: Sequence[str], start: int = 0) -> tuple[int, str]:
    """Where the first of `marks` from `start` on begins, and which it is; "" without one."""
    places = ((text.find(mark, start), mark) for mark in marks)
    return min((place for place in places if place[0] >= 0), default=(-1, ""))


class StopStringMatcher:
    """Passes text on until a stop string is complete; the text that comes out does not depend on
    how it was cut into pieces.

    The stop string that is complete first ends the text; of several, the longest. `include` passes
    the stop string on too.

    special_tokens: ids by text of the special tokens that stop strings hold and the text leaves
        out. A stop string with some is searched for as if the text showed them.
    """

    def __init__(
        self,
        stops: Sequence[str],
        *,
        include: bool = False,
        special_tokens: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.stops = tuple(sorted(set(stops), key=len, reverse=True))
        self.include = include
        self.held = ""  # what did not go out
        self.num_ahead = 0  # characters that the search with marks was given before they came
        self.shown = _Search({stop: stop for stop in self.stops})
        self.marks = {token: chr(MARKS + at) for at, token in enumerate(special_tokens.values())}
        self.marked: _Search | None = None
        if self.marks:
            texts = sorted(special_tokens, key=len, reverse=True)
            pattern = re.compile("|".join(map(re.escape, texts)))
            forms = {
                pattern.sub(lambda found: self.marks[special_tokens[found[0]]], stop): stop
                for stop in self.stops
            }
            self.marked = _Search({form: stop for form, stop in forms.items() if form != stop})

    def add_text(self, piece: str, *, can_stop: bool = True) -> StopMatch:
        """The text that may go out after `piece`; unless `can_stop`, no stop string may end within
        `piece`.
        """
        if not self.stops:
            return StopMatch(piece)
        self.held += piece
        found = self.shown.add(piece, can_stop=can_stop)
        if self.marked is not None:
            num_known = min(self.num_ahead, len(piece))
            other = self.marked.add(piece[num_known:], can_stop=can_stop)
            self.num_ahead -= num_known
            found = min(filter(None, (found, other)), key=_Found.order, default=None)
        return self._pass_on(found)

    def add_special_token(self, token: int, rest: str, *, can_stop: bool = True) -> StopMatch:
        """The text that may go out when `token`, one of `marks`, comes.

        rest: the text before the token that did not come yet
        """
        assert self.marked is not None, "internal error: no stop string holds a special token"
        piece = rest[self.num_ahead :] + self.marks[token]
        found = self.marked.add(piece, can_stop=can_stop)
        if found is not None:
            self.held += rest
        self.num_ahead = max(self.num_ahead, len(rest))
        return self._pass_on(found)

    def _pass_on(self, found: _Found | None) -> StopMatch:
        """What may go out of the text that is held."""
        if found is None:
            count = self.shown.num_pending
            if self.marked is not None:
                count = max(count, self.marked.num_pending - self.num_ahead)
            text, self.held = _cut(self.held, count)
            return StopMatch(text)
        text, _ = _cut(self.held, found.num_after_start)
        self.held = ""
        return StopMatch(text + found.stop if self.include else text, found.stop)

    def flush(self) -> str:
        """The text that was held back, when no more follows."""
        text, self.held = self.held, ""
        return text


@frozen
class _Found:
    """A stop string that is complete, and how much of the text comes after its start and its end;
    marks do not count.
    """

    stop: str
    num_after_start: int
    num_after_end: int

    def order(self) -> tuple[int, int]:
        """The first of several comes first, of those that end together the longest."""
        return -self.num_after_end, -len(self.stop)


class _Search:
    """Searches a text for stop strings, each given by the form that it has there."""

    def __init__(self, stops: Mapping[str, str]) -> None:
        # The longest come first, so that a tie leaves the longest.
        self.stops = dict(sorted(stops.items(), key=lambda pair: len(pair[0]), reverse=True))
        self.forms = tuple(self.stops)
        # The longest end of the text that may begin a stop string: had it gone out, a caller would
        # have printed half of a stop string that the next piece completes.
        self.pending = ""

    @property
    def num_pending(self) -> int:
        """Characters of the text that may begin a stop string."""
        return _count_shown(self.pending)

    def add(self, piece: str, *, can_stop: bool) -> _Found | None:
        """The first stop string that is complete within `piece`."""
        text = self.pending + piece
        match = self._first_match(text, len(self.pending)) if can_stop else None
        if match is None:
            self.pending = _cut(text, count_partial(text, self.forms))[1] if self.forms else ""
            return None
        end, form = match
        after_start, after_end = text[end - len(form) :], text[end:]
        return _Found(self.stops[form], _count_shown(after_start), _count_shown(after_end))

    def _first_match(self, text: str, start: int) -> tuple[int, str] | None:
        """The end and the form of the first match that ends after `start` characters."""
        best: tuple[int, str] | None = None
        for form in self.forms:
            begin = text.find(form, max(0, start - len(form) + 1))
            if begin >= 0 and (best is None or begin + len(form) < best[0]):
                best = (begin + len(form), form)
        return best


def _cut(text: str, count: int) -> tuple[str, str]:
    """The text without its last `count` characters, and those characters."""
    count = max(count, 0)
    return text[: len(text) - count], text[len(text) - count :]


def _count_shown(text: str) -> int:
    """The characters that stand for no special token."""
    if text.isascii():  # as most are
        return len(text)
    return sum(not 0xD800 <= ord(character) <= 0xDFFF for character in text)
