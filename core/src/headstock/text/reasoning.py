"""Splits the reasoning that some models write from the answer behind it, as the text comes."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from attrs import frozen

from headstock.text.stop import count_partial


@frozen
class ReasoningMarks:
    """The texts around reasoning."""

    start: str
    end: str


MARKS: Mapping[str, ReasoningMarks] = MappingProxyType(
    {
        "think": ReasoningMarks("<think>", "</think>"),
        "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
        "seed": ReasoningMarks("<seed:think>", "</seed:think>"),
    }
)
"""What --reasoning-parser may be -> the marks."""


class ReasoningState(Enum):
    """Where in an answer its next character is.

    START: at its beginning, where reasoning may begin
    INSIDE: in reasoning
    AFTER: in the answer itself
    """

    START = "start"
    INSIDE = "inside"
    AFTER = "after"


def find_marks(name: str, template: str) -> ReasoningMarks | None:
    """The marks called `name`; for "auto" those that a chat template has, if any."""
    if name != "auto":
        return MARKS.get(name)
    # The closing one: templates cut reasoning out of earlier turns by it.
    return next((marks for marks in MARKS.values() if marks.end in template), None)


def find_first_state(prompt: str, marks: ReasoningMarks, begun: str = "") -> ReasoningState:
    """Where an answer to `prompt` begins; it continues the text `begun` at the prompt's end."""
    # Templates open reasoning for the model, or close it at once where none is wanted. What the
    # variables of the template were called says nothing of that.
    end = prompt.rstrip()
    if end.endswith(marks.start) or begun.rfind(marks.start) > begun.rfind(marks.end):
        return ReasoningState.INSIDE
    return ReasoningState.AFTER if end.endswith(marks.end) else ReasoningState.START


class ReasoningSplitter:
    """Splits a text, which begins in `state`, into reasoning and answer.

    How the text is cut into pieces changes nothing. Line breaks beside the marks belong to neither.
    """

    def __init__(self, marks: ReasoningMarks, state: ReasoningState) -> None:
        self.marks = marks
        self.state = state
        self.held = ""
        # Line breaks may follow the mark that the prompt ends with.
        self.skips_breaks = state is not ReasoningState.START

    def feed(self, text: str) -> tuple[str, str]:
        """The reasoning and the answer that `text` makes certain."""
        if self.state is ReasoningState.AFTER and not self.skips_breaks:
            return "", text
        self.held += text
        reasoning = ""
        if self.state is ReasoningState.START:
            rest = self.held.lstrip()
            if self.marks.start.startswith(rest):
                if rest != self.marks.start:
                    return "", ""
            elif not rest.startswith(self.marks.start):
                self.state = ReasoningState.AFTER
                return "", self.take_held()
            self.state, self.skips_breaks = ReasoningState.INSIDE, True
            self.held = rest.removeprefix(self.marks.start)
        if self.state is ReasoningState.INSIDE:
            reasoning = self._read_reasoning()
        return reasoning, self._read_answer() if self.state is ReasoningState.AFTER else ""

    def _read_reasoning(self) -> str:
        """The reasoning in what is held, up to the closing mark."""
        self._skip_breaks()
        before, mark, after = self.held.partition(self.marks.end)
        if mark:
            self.state, self.held, self.skips_breaks = ReasoningState.AFTER, after, True
            return before.rstrip("\n")
        end = len(before) - count_partial(before, (self.marks.end,))
        certain = before[:end].rstrip("\n")
        self.held = before[len(certain) :]
        return certain

    def _read_answer(self) -> str:
        """The answer in what is held."""
        self._skip_breaks()
        return self.take_held()

    def _skip_breaks(self) -> None:
        if self.skips_breaks:
            self.held = self.held.lstrip("\n")
            self.skips_breaks = not self.held

    def take_held(self) -> str:
        """What is held, which is then empty."""
        held, self.held = self.held, ""
        return held

    def finish(self) -> tuple[str, str]:
        """The rest of the reasoning and of the answer, when no text follows."""
        held = self.take_held()
        if self.state is ReasoningState.INSIDE:
            return held if held.strip("\n") else "", ""
        return "", held
