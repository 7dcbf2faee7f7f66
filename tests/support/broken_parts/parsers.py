"""Tool parsers that are each wrong in one way."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from headstock.spi import Tool, ToolEvent, ToolEventKind, ToolParser


class Sound(ToolParser):
    """Finds no call; subclasses change one thing."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        pass

    def feed(self, text: str) -> Sequence[ToolEvent]:
        return [ToolEvent(ToolEventKind.CONTENT, text)]

    def finish(self) -> Sequence[ToolEvent]:
        return []


class CannotBeMade(Sound):
    def __init__(self, tools: Sequence[Tool]) -> None:
        raise IndexError("tuple index out of range")


class Exits(Sound):
    def feed(self, text: str) -> Sequence[ToolEvent]:
        sys.exit("no license")


class EndsNoCall(Sound):
    def finish(self) -> Sequence[ToolEvent]:
        return [ToolEvent(ToolEventKind.END)]


class KeepsText(Sound):
    def feed(self, text: str) -> Sequence[ToolEvent]:
        return [ToolEvent(ToolEventKind.CONTENT, text.strip())]
