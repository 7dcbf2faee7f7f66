"""Pieces of text with a loss weight, from which every document is made."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

# Random digits cannot be predicted, so they teach nothing; digits that follow from the text are
# what is to be learned.
NOISE_WEIGHT = 0.1
ANSWER_WEIGHT = 2.0


class Span(NamedTuple):
    """Text whose tokens count `weight` times in the training loss."""

    text: str
    weight: float = 1.0


Spans = list[Span]


def noise(text: object) -> Span:
    """Text that nothing before it determines."""
    return Span(str(text), NOISE_WEIGHT)


def answer(text: object) -> Span:
    """Text that what came before determines, and that is hard to get right."""
    return Span(str(text), ANSWER_WEIGHT)


def joined(spans: Sequence[Span]) -> str:
    """The bare text of the spans."""
    return "".join(span.text for span in spans)


def casual(rng: random.Random, text: str) -> str:
    """A question as people type it: now and then without its capital or its last mark."""
    if rng.random() < 0.2:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.2:
        text = text.rstrip("?.!")
    return text
