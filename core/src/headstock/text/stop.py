"""Stop strings, matched across the borders of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen


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
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self.stops = tuple(sorted(set(stops), key=len, reverse=True))
        self.include = include
        # The longest end of the text that may begin a stop string: had it gone out, a caller would
        # have printed half of a stop string that the next piece completes.
        self.pending = ""

    def add_text(self, piece: str, *, can_stop: bool = True) -> StopMatch:
        """The text that may go out after `piece`; unless `can_stop`, no stop string may end within
        `piece`.
        """
        if not self.stops:
            return StopMatch(piece)
        text = self.pending + piece
        match = self._first_match(text, len(self.pending)) if can_stop else None
        if match is None:
            length = count_partial(text, self.stops)
            self.pending = text[len(text) - length :]
            return StopMatch(text[: len(text) - length])
        self.pending = ""
        end, stop = match
        return StopMatch(text[: end if self.include else end - len(stop)], stop)

    def flush(self) -> str:
        """The text that was held back, when no more follows."""
        text, self.pending = self.pending, ""
        return text

    def _first_match(self, text: str, start: int) -> tuple[int, str] | None:
        """The end and the stop string of the first match that ends after `start` characters."""
        best: tuple[int, str] | None = None
        for stop in self.stops:
            begin = text.find(stop, max(0, start - len(stop) + 1))
            # The longest come first, so that a tie leaves the longest.
            if begin >= 0 and (best is None or begin + len(stop) < best[0]):
                best = (begin + len(stop), stop)
        return best
