"""Stop strings, found across the borders of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen


@frozen
class Found:
    """Text that may go out, and the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


class StopStrings:
    """Passes text on until a stop string is complete; what comes out does not depend on how the
    text was cut.

    The stop string that is complete first ends the text (of several, the longest). The longest end
    of the text that could begin one is held back.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self.stops = tuple(sorted(set(stops), key=len, reverse=True))
        self.include = include
        self.held = ""

    def feed(self, piece: str, *, armed: bool = True) -> Found:
        """What may go out after `piece`; while not `armed`, no stop string may end within it."""
        if not self.stops:
            return Found(piece)
        text = self.held + piece
        match = self.first(text, len(self.held)) if armed else None
        if match is None:
            keep = self.tail(text)
            self.held = text[len(text) - keep :]
            return Found(text[: len(text) - keep])
        self.held = ""
        end, stop = match
        return Found(text[: end if self.include else end - len(stop)], stop)

    def finish(self) -> str:
        """The text held back, when none follows."""
        rest, self.held = self.held, ""
        return rest

    def first(self, text: str, known: int) -> tuple[int, str] | None:
        """End and stop string of the first match that ends after `known` characters."""
        best: tuple[int, str] | None = None
        for stop in self.stops:
            at = text.find(stop, max(0, known - len(stop) + 1))
            if at >= 0 and (best is None or at + len(stop) < best[0]):
                best = (at + len(stop), stop)
        return best

    def tail(self, text: str) -> int:
        """Characters at the end of `text` that could begin a stop string."""
        longest = min(len(text), len(self.stops[0]) - 1)
        for size in range(longest, 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self.stops if len(stop) > size):
                return size
        return 0
