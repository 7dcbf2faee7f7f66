"""Tool parsers and grammar engines that are wrong in one way each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headstock.spi import GrammarKind, Matcher, Tool, ToolEvent, ToolEventKind, WrittenCall
from headstock.spi.arrays import Ints
from headstock_llguidance.engine import LLGrammar, LLGuidanceEngine, LLMatcher
from headstock_tool_parsers.hermes import HermesParser


class MarkCut(HermesParser):
    """Sees no mark that lies in two pieces."""

    def feed(self, text: str) -> list[ToolEvent]:
        if self.state == self.read_text and "<tool_call>" not in self.buffer + text:
            self.add_content(self.buffer + text)
            self.buffer = ""
            return self._take_events()
        return super().feed(text)


class TextStripped(HermesParser):
    """Leaves out white space at the end of an answer."""

    def finish(self) -> list[ToolEvent]:
        return [ToolEvent(each.kind, each.text.rstrip()) for each in super().finish()]


class EndTwice(HermesParser):
    """Ends each call a second time."""

    def feed(self, text: str) -> list[ToolEvent]:
        events: list[ToolEvent] = []
        for event in super().feed(text):
            events += [event] * (1 + (event.kind is ToolEventKind.END))
        return events


class EndLost(HermesParser):
    """Ends no call."""

    def feed(self, text: str) -> list[ToolEvent]:
        return [each for each in super().feed(text) if each.kind is not ToolEventKind.END]


class TailLost(HermesParser):
    """Forgets what it held back."""

    def finish(self) -> list[ToolEvent]:
        return []


class HoldingParser(HermesParser):
    """Keeps events for later as long as `is_due` says so."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self.kept: list[ToolEvent] = []
        self.num_read = 0

    def is_due(self) -> bool:
        """Whether what was kept goes out now."""
        return False

    def feed(self, text: str) -> list[ToolEvent]:
        self.num_read += len(text)
        self.kept += super().feed(text)
        if not self.is_due():
            return []
        events, self.kept = self.kept, []
        return events

    def finish(self) -> list[ToolEvent]:
        return [*self.kept, *super().finish()]


class HoldsAll(HoldingParser):
    """Gives everything out at the end."""


class HoldsText(HoldingParser):
    """Gives text out by a hundred characters."""

    def is_due(self) -> bool:
        is_text = all(event.kind is ToolEventKind.CONTENT for event in self.kept)
        return not is_text or sum(len(event.text) for event in self.kept) >= 100


class HoldsLateText(HoldingParser):
    """Gives nothing more out before the end once there are 3,000 characters."""

    def is_due(self) -> bool:
        return self.num_read <= 3000


class HoldsCalls(HoldingParser):
    """Gives calls out when they have ended."""

    def is_due(self) -> bool:
        kinds = [event.kind for event in self.kept]
        return kinds.count(ToolEventKind.CALL) == kinds.count(ToolEventKind.END)


class EndInvented(HermesParser):
    """Closes what an answer breaks off in."""

    def finish(self) -> list[ToolEvent]:
        was_open = self.state == self.read_call
        events = super().finish()
        if was_open and not any(each.kind is ToolEventKind.CONTENT for each in events):
            return [*events, ToolEvent(ToolEventKind.ARGUMENTS, "}"), ToolEvent(ToolEventKind.END)]
        return events


class WritesOthersCalls(HermesParser):
    """Says that calls are written in a format that it does not read."""

    def write_call(self, name: str) -> list[WrittenCall]:
        return [WrittenCall(before=f"[TOOL_CALLS]{name}", after="")]


class MarksMissed(HermesParser):
    """Says that calls begin with another mark."""

    call_marks = ("[TOOL_CALLS]",)


class TextInvented(HermesParser):
    """Closes the brackets of a call that the answer breaks off in."""

    def finish(self) -> list[ToolEvent]:
        was_open = self.state == self.read_call
        events = super().finish()
        if was_open and not any(each.kind is ToolEventKind.CONTENT for each in events):
            return [*events, ToolEvent(ToolEventKind.ARGUMENTS, "]}")]
        return events


class TextAfterCallsLost(HermesParser):
    """Forgets all text once there was a call."""

    had_call = False

    def add_content(self, text: str) -> None:
        if not self.had_call:
            super().add_content(text)

    def end_call(self) -> bool:
        self.had_call = True
        return super().end_call()


class BracketsLost(HermesParser):
    """Takes brackets in text behind a call for marks."""

    def end_call(self) -> bool:
        self.marks = ("<tool_call>", "{x}")
        return super().end_call()

    def begin_call(self) -> bool:
        if self.opening.endswith("{x}"):
            self.opening = ""
            return self.give_up()
        return super().begin_call()


class ArgumentsBroken(HermesParser):
    """Ends calls whose arguments are no JSON."""

    def feed(self, text: str) -> list[ToolEvent]:
        return [
            ToolEvent(each.kind, each.text.replace("1", "01"))
            if each.kind is ToolEventKind.ARGUMENTS
            else each
            for each in super().feed(text)
        ]


class BitMissing(LLMatcher):
    """Never allows the first token that may come next."""

    def fill_mask(self, mask: Ints) -> bool:
        may_end = super().fill_mask(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        bits[1 + int(bits[1:].argmax())] = 0
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)
        return may_end


class AllAllowed(LLMatcher):
    """Allows every token."""

    def fill_mask(self, mask: Ints) -> bool:
        may_end = super().fill_mask(mask)
        mask[:8] = -1
        return may_end


class RollbackShort(LLMatcher):
    """Goes one token less far back."""

    def rollback(self, count: int) -> None:
        super().rollback(max(count - 1, 1))


class EndAnywhere(LLMatcher):
    """Lets every text end."""

    def fill_mask(self, mask: Ints) -> bool:
        super().fill_mask(mask)
        return True


class Engine(LLGuidanceEngine):
    """Has matchers of another class."""

    matcher: type[LLMatcher] = LLMatcher

    def compile(self, kind: GrammarKind, text: str) -> LLGrammar:
        compiled, matcher = super().compile(kind, text), self.matcher

        class Grammar(LLGrammar):
            def start(self) -> LLMatcher:
                return matcher(self.matcher.deep_copy())

        return Grammar(compiled.matcher)


class MasksMissBit(Engine):
    matcher = BitMissing


class MasksAllowAll(Engine):
    matcher = AllAllowed


class RollsBackShort(Engine):
    matcher = RollbackShort


class EndsAnywhere(Engine):
    matcher = EndAnywhere


class MovesMatchers(Engine):
    """Leaves matchers behind the drafts."""

    def fill_masks(
        self, matchers: Sequence[tuple[Matcher, Ints]], masks: np.ndarray
    ) -> list[tuple[bool, ...] | ValueError]:
        answers = super().fill_masks(matchers, masks)
        for matcher, drafts in matchers:
            matcher.advance(drafts)
        return answers


class TakesAnything(LLGuidanceEngine):
    """Takes a grammar that it cannot read for any text."""

    def compile(self, kind: GrammarKind, text: str) -> LLGrammar:
        try:
            return super().compile(kind, text)
        except ValueError:
            return super().compile(GrammarKind.REGEX, "(.|\n)*")


class OneMatcher(LLGuidanceEngine):
    """Gives all answers one matcher."""

    def compile(self, kind: GrammarKind, text: str) -> LLGrammar:
        compiled = super().compile(kind, text)
        matcher = compiled.start()
        vars(compiled)["start"] = lambda: matcher
        return compiled


class RulesDropped(LLGuidanceEngine):
    """Leaves out a rule that it does not know."""

    def compile(self, kind: GrammarKind, text: str) -> LLGrammar:
        return super().compile(kind, text.replace('"uniqueItems": true, ', ""))
