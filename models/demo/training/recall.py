"""Numbers to remember, other text between, and questions for the numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from . import sums
from .spans import Span, Spans, answer, joined, noise
from .stories import story
from .words import NAMES, NUMBERED, any_name

# How long the text between may be, in characters, of which a token has about three.
REACHES = (1, 400, 1500, 5400, 5400, 10500)


class Fact(NamedTuple):
    """Whose what has which number."""

    name: str
    thing: str
    number: str

    @property
    def subject(self) -> str:
        return f"the number of the {self.thing} of {self.name}"


def facts(rng: random.Random, count: int) -> list[Fact]:
    """Facts of which no two are about the same thing of the same name."""
    names = (*NAMES, any_name(rng), any_name(rng))
    subjects = rng.sample(sorted({(name, thing) for name in names for thing in NUMBERED}), count)
    return [Fact(name, thing, str(rng.randrange(1000, 10000))) for name, thing in subjects]


def reminder(fact: Fact) -> Spans:
    """`Remember: the number of the boat of Anna is 4821.`"""
    start = [
        Span("Remember: the number of the "),
        noise(fact.thing),
        Span(" of "),
        noise(fact.name),
    ]
    return [*start, Span(" is "), noise(fact.number), Span(".")]


def question(fact: Fact) -> Spans:
    """`Question: what is the number of the boat of Anna? Answer: 4821.`"""
    return [
        Span("Question: what is the number of the "),
        noise(fact.thing),
        Span(" of "),
        noise(fact.name),
        Span("? Answer: "),
        answer(f"{fact.number}."),
    ]


def filler(rng: random.Random) -> Spans:
    """Text that has nothing to do with the facts."""
    return [Span(story(rng), 0.5)] if rng.random() < 0.6 else sums.listed(rng, rng.randint(1, 12))


def fillers(rng: random.Random, chars: int) -> list[Spans]:
    """Pieces of other text, about `chars` characters in all."""
    pieces: list[Spans] = []
    while (room := chars - sum(len(joined(spans)) for spans in pieces)) > 0:
        pieces.append(filler(rng) if room > 400 else sums.listed(rng, max(1, min(12, room // 15))))
    return pieces


def lines(pieces: Sequence[Spans]) -> Spans:
    """The pieces, one below the other."""
    spans: Spans = []
    for index, piece in enumerate(pieces):
        spans += [Span("\n")] * (index > 0) + piece
    return spans


def document(rng: random.Random) -> Spans:
    """Facts, other text, and a question for each fact in another order."""
    known = facts(rng, rng.choice((1, 1, 2, 2, 3, 4, 5, 6)))
    between = fillers(rng, rng.randrange(rng.choice(REACHES)))
    late = rng.randrange(len(known)) if rng.random() < 0.3 else 0
    pieces = [reminder(fact) for fact in known[late:]] + between
    for fact in known[:late]:
        pieces.insert(rng.randint(len(known) - late, len(pieces)), reminder(fact))
    asked = rng.sample(known, len(known))
    return lines([*pieces, *(question(fact) for fact in asked)])
