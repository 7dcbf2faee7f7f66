"""Grammar engines that are each wrong in one way."""

from __future__ import annotations

import sys
from typing import Any

from headstock.spi import CompiledGrammar, GrammarEngine, GrammarKind, Matcher, Vocabulary
from headstock.spi.arrays import Ints


class AnyText(Matcher):
    """Allows every token; subclasses change one thing."""

    def fill_mask(self, mask: Ints) -> bool:
        mask[:] = -1
        return True

    def advance(self, tokens: Ints) -> int:
        return len(tokens)

    def rollback(self, count: int) -> None:
        pass


class Compiled(CompiledGrammar):
    def __init__(self, matcher: type[Matcher]) -> None:
        self.matcher = matcher

    def start(self) -> Matcher:
        return self.matcher()


class Sound(GrammarEngine):
    matcher: type[Matcher] = AnyText

    def __init__(self, vocabulary: Vocabulary) -> None:
        pass

    def compile(self, kind: GrammarKind, text: str) -> Any:
        return Compiled(self.matcher)


class CannotBeMade(Sound):
    def __init__(self, vocabulary: Vocabulary) -> None:
        raise KeyError("tokens")


class CompilesNone(Sound):
    def compile(self, kind: GrammarKind, text: str) -> Any:
        return None


class LeavingMatcher(AnyText):
    def fill_mask(self, mask: Ints) -> bool:
        sys.exit(3)


class Exits(Sound):
    matcher = LeavingMatcher


class EmptyMatcher(AnyText):
    def fill_mask(self, mask: Ints) -> bool:
        mask[:] = 0
        return False


class FillsNothing(Sound):
    matcher = EmptyMatcher


class StandingMatcher(AnyText):
    def advance(self, tokens: Ints) -> int:
        return 0


class FollowsNothing(Sound):
    matcher = StandingMatcher
