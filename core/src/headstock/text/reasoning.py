"""Splits the reasoning that some models write from the answer behind it, as the text comes."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from attrs import evolve, frozen

from headstock.text.reasoning_calls import CallFinder
from headstock.text.stop import count_partial, find_first


@frozen
class ReasoningMarks:
    """The texts around reasoning.

    closes_alone: whether the closing one ends reasoning that no opening one began
    """

    start: str
    end: str
    closes_alone: bool = False


MARKS: Mapping[str, ReasoningMarks] = MappingProxyType(
    {
        "think": ReasoningMarks("<think>", "</think>", closes_alone=True),
        "qwen3": ReasoningMarks("<think>", "</think>"),
        "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
        "seed": ReasoningMarks("<seed:think>", "</seed:think>"),
    }
)
"""What --reasoning-parser may be -> the marks."""

R1_TURN = "<\uff5cAssistant\uff5c>"
"""What begins an answer in the chat templates of DeepSeek-R1 and its distillates."""


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
    marks = next((marks for marks in MARKS.values() if marks.end in template), None)
    if marks is None:
        return None
    # Nothing else tells these models, which always reason, from those that seldom do: LFM2.5's
    # template cuts by the closing mark alone, too.
    is_r1 = R1_TURN in template and marks.start not in template
    return evolve(marks, closes_alone=is_r1)


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

    calls: finds calls in reasoning; the first one ends it, and is part of the answer
    is_ended_by_call: whether one did
    """

    def __init__(
        self,
        marks: ReasoningMarks,
        state: ReasoningState,
        calls: CallFinder | None = None,
    ) -> None:
        self.marks = marks
        self.state = state
        self.held = ""
        # The prompt ends with a mark, which line breaks and the same mark may follow.
        self.repeated = {
            ReasoningState.START: "",
            ReasoningState.INSIDE: marks.start,
            ReasoningState.AFTER: marks.end,
        }[state]
        self.num_searched = 0
        self.is_ended_by_call = False
        self.calls = calls

    def feed(self, text: str) -> tuple[str, str]:
        """The reasoning and the answer that `text` makes certain."""
        if self.state is ReasoningState.AFTER and not self.repeated:
            return "", text
        self.held += text
        return self._read(is_last=False)

    def finish(self) -> tuple[str, str]:
        """The rest of the reasoning and of the answer, when no text follows."""
        return self._read(is_last=True)

    def take_held(self) -> str:
        """What is held, which is then empty."""
        held, self.held = self.held, ""
        return held

    def _read(self, *, is_last: bool) -> tuple[str, str]:
        reasoning = ""
        if self.state is ReasoningState.START:
            reasoning = self._read_start(is_last=is_last)
        if self.state is ReasoningState.INSIDE and self._skip_repeated(is_last=is_last):
            reasoning = self._read_reasoning(is_last=is_last)
        if self.state is ReasoningState.AFTER and self._skip_repeated(is_last=is_last):
            return reasoning, self.take_held()
        return reasoning, ""

    def _read_start(self, *, is_last: bool) -> str:
        """The reasoning that no mark began; what is held stays so while it may be that."""
        start, end = self.marks.start, self.marks.end
        rest = self.held.lstrip()
        if rest.startswith(start):
            self.held = rest[len(start) :]
            self._enter(ReasoningState.INSIDE, start)
        elif is_last or not start.startswith(rest):
            if not self.marks.closes_alone:
                self._enter(ReasoningState.AFTER)
                return ""
            # Either mark decides. An opening one has something before it, and is quoted.
            position, mark = find_first(self.held, (start, end), self.num_searched)
            if mark == end:
                before = self.held[:position]
                self.held = self.held[position + len(end) :]
                self._enter(ReasoningState.AFTER, end)
                return before.strip("\n")
            if mark or is_last:
                self._enter(ReasoningState.AFTER)
            self.num_searched = max(0, len(self.held) - max(len(start), len(end)) + 1)
        return ""

    def _enter(self, state: ReasoningState, repeated: str = "") -> None:
        self.state, self.repeated = state, repeated

    def _skip_repeated(self, *, is_last: bool) -> bool:
        """Drop line breaks behind a mark, and the mark where models repeat it; whether what follows
        is known.
        """
        mark = self.repeated
        if not mark:
            return True
        rest = self.held.lstrip()
        while rest.startswith(mark):
            self.held = rest[len(mark) :]
            rest = self.held.lstrip()
        if not is_last and mark.startswith(rest):
            return False
        self.held = self.held.lstrip("\n")
        self.repeated = ""
        return True

    def _read_reasoning(self, *, is_last: bool) -> str:
        """The reasoning in what is held, up to the closing mark or a call."""
        parts: list[str] = []
        marks = (self.marks.end, *(self.calls.openings if self.calls else ()))
        while True:
            position, mark = find_first(self.held, marks)
            if not mark:
                kept = 0 if is_last else count_partial(self.held, marks)
                parts.append(self._take_reasoning(len(self.held) - kept))
                return "".join(parts)
            is_call: bool | None = False
            if mark != self.marks.end and self.calls is not None:
                is_call = self.calls.judge(self.held, position, mark, self.marks.end, is_last)
                if is_call is False:
                    parts.append(self._take_reasoning(position + len(mark)))
                    continue
            parts.append(self._take_reasoning(position))
            if is_call is not None:
                self.held = self.held.lstrip("\n")
                self.is_ended_by_call = is_call
                if not is_call:
                    self.held = self.held.removeprefix(mark)
                self._enter(ReasoningState.AFTER, "" if is_call else mark)
            return "".join(parts)

    def _take_reasoning(self, count: int) -> str:
        """The first `count` characters of what is held, up to the line breaks at their end."""
        text = self.held[:count].rstrip("\n")
        self.held = self.held[len(text) :]
        if self.calls is not None:
            self.calls.pass_over(text)
        return text
