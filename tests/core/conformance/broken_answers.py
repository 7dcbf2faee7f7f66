"""Tool parsers and grammar engines that are wrong in one way each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headstock.spi import GrammarKind, Matcher, ToolEvent, ToolEventKind
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
