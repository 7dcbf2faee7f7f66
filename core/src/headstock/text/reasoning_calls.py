"""Calls of tools in reasoning that their model did not close."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from headstock.spi import ToolEvent, ToolEventKind, ToolParser

MAX_UNDECIDED = 65_536
"""Characters behind an opening within which a parser must know whether it begins a call: most know
with its name, some with the value of its first argument.
"""


class CallFinder:
    """Tells calls in reasoning from text that looks like one.

    It is not known yet whether the reasoning will be closed, so the opening decides: it stands on
    its own line, outside code, and the parser reads the call of a tool that the request offers.

    openings: what calls begin with
    names: of the tools; None for any
    """

    def __init__(
        self,
        openings: Sequence[str],
        make_parser: Callable[[], ToolParser],
        names: Collection[str] | None = None,
    ) -> None:
        self.openings = tuple(openings)
        self.make_parser = make_parser
        self.names = names
        self.line = ""  # the line that the reasoning so far ends with
        self.is_fenced = False  # whether it is in a block of code
        self._parser: ToolParser | None = None
        self._num_judged = 0

    def pass_over(self, text: str) -> None:
        """Take note of reasoning without a call."""
        self.line, self.is_fenced = self._find_place(text)

    def _find_place(self, text: str) -> tuple[str, bool]:
        """The last line when `text` follows, and whether it is in a block of code."""
        *whole, line = (self.line + text).split("\n")
        num_fences = sum(each.lstrip().startswith(("```", "~~~")) for each in whole)
        return line, self.is_fenced ^ bool(num_fences % 2)

    def judge(
        self, text: str, position: int, opening: str, end_mark: str, is_last: bool
    ) -> bool | None:
        """Whether the opening at this position of `text`, which follows what was passed over,
        begins a call; None while more text must come.
        """
        if self._parser is None:
            line, is_fenced = self._find_place(text[:position])
            is_alone = opening.endswith("\n") or not line.strip()
            if is_fenced or line.count("`") % 2 or not is_alone:
                return False
            self._parser, self._num_judged = self.make_parser(), 0
        end = position + len(opening) + MAX_UNDECIDED
        is_call: bool | None = None
        # One character at a time: when a parser knows must not depend on how the text was cut.
        for index in range(position + self._num_judged, min(len(text), end)):
            if text.endswith(end_mark, position, index + 1):
                is_call = False
            else:
                is_call = self._find_call(self._parser.feed(text[index]))
            self._num_judged += 1
            if is_call is not None:
                break
        if is_call is None and len(text) >= end:
            is_call = False
        elif is_call is None and is_last:
            is_call = bool(self._find_call(self._parser.finish()))
        if is_call is not None:
            self._parser = None
        return is_call

    def _find_call(self, events: Iterable[ToolEvent]) -> bool | None:
        """Whether a call begins with these events; None while that is open."""
        for event in events:
            if event.kind is ToolEventKind.CALL:
                return self.names is None or event.text in self.names
            if event.text.strip():
                return False
        return None
