"""Sums and differences of small numbers and the times tables, in the forms people write them."""

from __future__ import annotations

import random
import zlib
from typing import NamedTuple

from .spans import Span, Spans, answer, noise

LIMIT = 100  # most numbers are below this
HIGH_LIMIT = 1000
TABLES = 12
HELD_OUT_PART = 12  # one in so many is kept out of the training text
WORDS = {"+": "plus", "-": "minus", "*": "times"}


class Sum(NamedTuple):
    """Two numbers and what is done with them."""

    first: int
    sign: str
    second: int

    @property
    def result(self) -> int:
        return {
            "+": self.first + self.second,
            "-": self.first - self.second,
            "*": self.first * self.second,
        }[self.sign]

    @property
    def word(self) -> str:
        return WORDS[self.sign]

    @property
    def is_held_out(self) -> bool:
        """Whether the sum is kept for the test; b + a goes with a + b, and the times tables are all
        trained on.
        """
        low, high = sorted((self.first, self.second))
        return (
            self.sign != "*"
            and zlib.crc32(f"{low} {self.sign} {high}".encode()) % HELD_OUT_PART == 0
        )


def any_sum(rng: random.Random) -> Sum:
    """A sum, held out or not."""
    if rng.random() < 0.05:
        return Sum(rng.randint(0, TABLES), "*", rng.randint(0, TABLES))
    limit = HIGH_LIMIT if rng.random() < 0.25 else LIMIT
    first, second = rng.randrange(limit), rng.randrange(limit)
    if rng.random() < 0.15:
        return Sum(max(first, second), "-", min(first, second))
    return Sum(first, "+", second)


def draw(rng: random.Random) -> Sum:
    """A sum to be trained on."""
    while (sum_ := any_sum(rng)).is_held_out:
        pass
    return sum_


def held_out(sign: str, start: int, stop: int) -> list[Sum]:
    """The held-out sums of two numbers in the range; differences are not negative."""
    sums = (
        Sum(first, sign, second) for first in range(start, stop) for second in range(start, stop)
    )
    return [sum_ for sum_ in sums if sum_.is_held_out and (sign == "+" or sum_.result >= 0)]


def written(sum_: Sum) -> Spans:
    """`23 + 48 = 71.`"""
    return [
        noise(sum_.first),
        Span(f" {sum_.sign} "),
        noise(sum_.second),
        Span(" = "),
        answer(f"{sum_.result}."),
    ]


# How people ask for a sum, by what is done; the first forms are the most usual.
ASKED = {
    "+": (
        "What is {a} plus {b}?",
        "Add {a} and {b}.",
        "What is the sum of {a} and {b}?",
        "Please sum {a} and {b}.",
    ),
    "-": ("What is {a} minus {b}?", "Take {b} from {a}.", "Subtract {b} from {a}."),
    "*": ("What is {a} times {b}?", "Multiply {a} by {b}.", "What is {a} x {b}?"),
}
ASKED_SIGN = (
    "What is {a} {sign} {b}?",
    "{a} {sign} {b}",
    "{a}{sign}{b}",
    "{a} {sign} {b} =",
    "How much is {a} {sign} {b}?",
    "Can you tell me what {a} {sign} {b} is?",
    "Calculate {a} {sign} {b}",
    "What's {a} {sign} {b}?",
)


def question(rng: random.Random, sum_: Sum) -> str:
    """The sum as somebody may ask for it."""
    form = ASKED_SIGN[0] if rng.random() < 0.3 else rng.choice(ASKED_SIGN + ASKED[sum_.sign])
    if rng.random() < 0.1:
        form = form.replace("What is", "What's")
    return form.format(a=sum_.first, b=sum_.second, sign=sum_.sign)


def spoken(rng: random.Random, sum_: Sum) -> Spans:
    """The sum in words, or as a question with its answer."""
    first, second, result = noise(sum_.first), noise(sum_.second), answer(f"{sum_.result}.")
    form = rng.randrange(3)
    if form == 0:
        return [first, Span(f" {sum_.word} "), second, Span(" is "), result]
    if form == 1:
        asked = question(rng, sum_)
        return [noise(asked), Span(" " if asked[-1] in "=?" else "\n"), result]
    return [
        Span("Question: what is "),
        first,
        Span(f" {sum_.sign} "),
        second,
        Span("? Answer: "),
        result,
    ]


def listed(rng: random.Random, count: int) -> Spans:
    """Written sums, one a line; in half of the lists the first number goes up by one each time."""
    sums = [draw(rng) for _ in range(count)]
    if rng.random() < 0.5:
        start, second = rng.randrange(LIMIT - count), rng.randrange(LIMIT)
        rising = [Sum(first, "+", second) for first in range(start, start + count)]
        sums = [sum_ for sum_ in rising if not sum_.is_held_out] or sums
    spans: Spans = []
    for index, sum_ in enumerate(sums):
        spans += [Span("\n")] * (index > 0) + written(sum_)
    return spans


def document(rng: random.Random) -> Spans:
    """One sum standing alone, or a list of them."""
    form = rng.random()
    if form < 0.6:
        return written(draw(rng))
    if form < 0.9:
        return spoken(rng, draw(rng))
    return listed(rng, rng.randint(3, 12))
