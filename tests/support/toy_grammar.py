"""A grammar engine for the toy model, whose rules can be worked out by hand."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np
from attrs import define, field

from headstock.scheduler import Request
from headstock.spi import (
    CompiledGrammar,
    GrammarEngine,
    GrammarKind,
    GrammarSpec,
    Matcher,
    SpiRange,
    Vocabulary,
)
from headstock.spi.arrays import Ints
from headstock.structured_outputs import ReasoningTokens
from headstock_conformance.scheduler.toy_device import VOCAB, next_token

END = VOCAB - 1
"""The token that ends an answer."""


def spec() -> GrammarSpec:
    """The grammar plugin `toy-rules`."""
    return GrammarSpec(
        name="toy-rules",
        spi=SpiRange(0, 3),
        summary="rules for the toy model",
        implementation="toy_grammar:ToyEngine",
    )


def is_allowed(history: Sequence[int], token: int) -> bool:
    """Whether a token may come after these of an answer: a third may, others each time."""
    return token != END and (token + sum(history) + 5 * len(history)) % 3 == 0


def follow_rules(
    request: Request, most: int, reasoning: ReasoningTokens | None = None
) -> list[int]:
    """The greedy answer of so many tokens: the toy model prefers those right after its own.

    With `reasoning`, what comes before counts for no rule, but may not end the answer.
    """
    prompt, text, answer = [int(token) for token in request.prompt], list[int](), list[int]()
    reasons = reasoning is not None and reasoning.start is None
    while len(text) < request.max_tokens:
        token = next_token([*prompt, *text])
        start = None if reasoning is None or text else reasoning.start
        if reasons:
            token = (token + 1) % VOCAB if token == END else token
            reasons = reasoning is not None and token != reasoning.end
        elif len(answer) == most:
            token = END
        else:
            while not is_allowed(answer, token) and token != start:
                token = (token + 1) % VOCAB
            reasons = token == start
            answer += [] if reasons else [token]
        text.append(token)
        if token == END:
            break
    return text


@define
class ToyMatcher(Matcher):
    """Follows an answer of `most` tokens; `fails` is the length at which it cannot go on."""

    most: int
    fails: int
    history: list[int] = field(factory=list)

    def fill_mask(self, mask: Ints) -> bool:
        """Set the bits of what is allowed."""
        if len(self.history) == self.fails:
            raise ValueError("too complex")
        bits = np.zeros(len(mask) * 32, bool)
        if len(self.history) < self.most:
            bits[:VOCAB] = [is_allowed(self.history, token) for token in range(VOCAB)]
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)
        return len(self.history) >= self.most

    def advance(self, tokens: Ints) -> int:
        """Follow tokens."""
        for count, token in enumerate(tokens.tolist()):
            if len(self.history) >= self.most or not is_allowed(self.history, token):
                return count
            self.history.append(token)
        return len(tokens)

    def rollback(self, count: int) -> None:
        """Go back."""
        del self.history[len(self.history) - count :]


@define
class ToyGrammar(CompiledGrammar):
    """A rule."""

    most: int
    fails: int

    def start(self) -> ToyMatcher:
        """Begin an answer."""
        return ToyMatcher(self.most, self.fails)


class ToyEngine(GrammarEngine):
    """Compiles "12", answers of 12 tokens, "12 fails 3", and words that misbehave."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        assert vocabulary.size == VOCAB

    def compile(self, kind: GrammarKind, text: str) -> ToyGrammar:
        """Compile a rule."""
        match text.split():
            case ["hang"]:
                time.sleep(600)
            case ["crash"]:
                os._exit(139)
            case ["eat"]:
                np.ones(1 << 40, np.uint8)
            case ["raise"]:
                raise TypeError("not a rule at all")
            case [most, "fails", length]:
                return ToyGrammar(int(most), int(length))
            case [most] if most.isdigit():
                return ToyGrammar(int(most), -1)
        raise ValueError(f"no rule is called {text}")
