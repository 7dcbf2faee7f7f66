"""Find the end of an argument written as text between tags."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence

from headstock_tool_parsers.argument_types import ArgumentTypes
from headstock_tool_parsers.call_parser import match_mark

CALL, END_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
OPENERS = {END_CALL: CALL, END_FUNCTION: FUNCTION, END_PARAMETER: PARAMETER}
MARKS = (*OPENERS, *OPENERS.values())
TAG = re.compile(r"</?(?:tool_call|function|parameter)")
MAX_TAG = 64
"""Maximum characters of a tag before its name, including blanks."""

MAX_WORD = 256
"""Characters of a name in a tag."""

WORD = re.compile(r"[^<>\n]*")
BLANKS = re.compile(r"\s*")
SPACES = re.compile(r"[ \t\r]*")


class ValueEnd:
    """Finds the end of one value, which comes in pieces.

    Values are code often enough, with tags of their own. A tag counts where it begins a line, or
    where the value itself begins right behind its opening tag. Tags of the value's own open and
    close each other where they begin lines. What ends a value, then:

    - `</parameter>`, also elsewhere if another tag follows it
    - `<parameter=k>` with a name that the tool's schema has
    - `</function>` and `</tool_call>`, with nothing but tags behind them on the line; also
      elsewhere if `</tool_call>` follows
    - `<function=f>`, perhaps after `<tool_call>`, with the name of an offered tool and a tag
      behind it
    """

    def __init__(self, names: Collection[str], types: ArgumentTypes) -> None:
        self.names = names
        self.types = types
        self.num_open: Counter[str] = Counter()
        self.position = 0  # the text before is known to be part of the value

    def find(self, text: str, *, is_last: bool) -> tuple[int, int] | None:
        """The length of the value and where what follows begins; None where more text must come.

        text: the value so far, and perhaps more; is_last: no more follows
        """
        while tag := TAG.search(text, self.position):
            start = tag.start()
            found = find_mark(text, start, MARKS)
            if found is None:
                self.position = start
                return None
            mark, length = found
            ends = self._ends_value(text, start, mark, start + length, is_last=is_last)
            if ends is None:
                self.position = start
                return None
            if ends:
                return start, start + length if mark == END_PARAMETER else start
            self._note_tag(mark, text[text.rfind("\n", 0, start) + 1 : start])
            self.position = start + 1
        self.position = max(self.position, len(text) - MAX_TAG)
        return None

    def _note_tag(self, mark: str, before: str) -> None:
        """Count a tag that is part of the value, and has `before` on its line."""
        if mark in OPENERS.values():
            self.num_open[mark] += not before.strip()
        elif mark:
            opener = OPENERS[mark]
            self.num_open[opener] = max(self.num_open[opener] - 1, 0)

    def _ends_value(
        self, text: str, start: int, mark: str, end: int, *, is_last: bool
    ) -> bool | None:
        """Whether a tag ends the value; None if more text is needed."""
        is_inline = not text.startswith("\n")
        begins_line = is_inline or text[start - 1] == "\n"
        if mark == END_PARAMETER:
            if begins_line and not self.num_open[PARAMETER]:
                return True
            is_end = self._is_followed(text, end)
        elif mark in OPENERS:
            if self.num_open[OPENERS[mark]]:
                return False
            if not begins_line:
                return self._is_before_end_of_call(text, end)
            is_end = is_inline or self._ends_line(text, end)
        else:
            return begins_line and self._begins_next(text, start, mark)
        return True if is_last and is_end is None else is_end

    def _ends_line(self, text: str, position: int) -> bool | None:
        """Whether the line has no more text; None if more text is needed."""
        found = find_mark(text, pass_over(SPACES, text, position), ("\n", *MARKS))
        return None if found is None else bool(found[0])

    def _is_before_end_of_call(self, text: str, position: int) -> bool | None:
        """Whether the next tag closes this call; None as above."""
        found = find_mark(text, pass_over(BLANKS, text, position), (END_CALL,))
        return None if found is None else bool(found[0]) and not self.num_open[CALL]

    def _is_followed(self, text: str, position: int) -> bool | None:
        """Whether the next tag can only follow a value; None as above."""
        start = pass_over(BLANKS, text, position)
        found = find_mark(text, start, MARKS)
        if found is None:
            return None
        if found[0] in OPENERS:
            return not self.num_open[OPENERS[found[0]]]
        return self._begins_next(text, start, found[0])

    def _begins_next(self, text: str, start: int, mark: str) -> bool | None:
        """Whether an opening tag is that of the next argument or call; None as above."""
        if mark == PARAMETER:
            key, end = read_word(text, start + len(mark))
            return None if end is None else self.types.is_known(key)
        return mark in (CALL, FUNCTION) and self._begins_call(text, start)

    def _begins_call(self, text: str, start: int) -> bool | None:
        """Whether a call of an offered tool begins here; None as above."""
        for mark in (CALL, FUNCTION):
            found = find_mark(text, start, (mark,))
            if found is None:
                return None
            if mark == FUNCTION and not found[0]:
                return False
            start = pass_over(BLANKS, text, start + found[1])
        name, end = read_word(text, start, blanks=True)
        if end is None:
            return None
        if not text.startswith(">", end) or name not in self.names:
            return False
        start = pass_over(BLANKS, text, end + 1)
        found = find_mark(text, start, (PARAMETER, END_FUNCTION, "{"))
        return None if found is None else bool(found[0])


def find_mark(text: str, start: int, marks: Sequence[str]) -> tuple[str, int] | None:
    """`match_mark` of the text from there; a mark with too many blanks does not count."""
    found = match_mark(text[start : start + MAX_TAG], marks)
    return ("", 0) if found is None and len(text) - start >= MAX_TAG else found


def pass_over(pattern: re.Pattern[str], text: str, start: int) -> int:
    """The position after the match of the pattern there."""
    match = pattern.match(text, start)
    return match.end() if match else start


def read_word(text: str, start: int = 0, *, blanks: bool = False) -> tuple[str, int | None]:
    """The name in a tag, without blanks and quotes around it, and where it ends; None where more
    text must come.

    blanks: whether line breaks may follow it within the tag
    """
    end = pass_over(WORD, text, start)
    if blanks:
        end = pass_over(BLANKS, text, end)
    is_part = end == len(text) and end - start <= MAX_WORD
    return text[start:end].strip().strip("\"'"), None if is_part else end
