"""The training text: documents of every kind, as rows of tokens with a loss weight each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from . import chats, facts, recall, sums
from .spans import END_OF_TEXT, Span, Spans, joined
from .stories import story

END = 0  # the token <|endoftext|>
WEIGHT_UNIT = 20  # weights are kept in twentieths, one byte each
OPEN_DOCUMENTS = 64

# kind of document: its share of the characters, how it is made
KINDS: dict[str, tuple[float, Callable[[random.Random], Spans]]] = {
    "stories": (0.28, lambda rng: [Span(story(rng))]),
    "sums": (0.17, sums.document),
    "recall": (0.25, recall.document),
    "chats": (0.25, chats.document),
    "facts": (0.05, facts.document),
}


class Document(NamedTuple):
    """tokens: [tokens] uint16    weights: [tokens] uint8, in twentieths"""

    tokens: NDArray[np.uint16]
    weights: NDArray[np.uint8]


class Rows(NamedTuple):
    """Documents laid end to end, never cut: tokens, weights: [rows, length]"""

    tokens: NDArray[np.uint16]
    weights: NDArray[np.uint8]


def documents(seed: int, chars: int) -> list[Spans]:
    """Documents of all kinds in their shares, `chars` characters in all, in random order."""
    rng = random.Random(seed)
    made = dict.fromkeys(KINDS, 0)
    texts: list[Spans] = []
    while sum(made.values()) < chars:
        kind = min(KINDS, key=lambda name: made[name] / KINDS[name][0])
        texts.append([*KINDS[kind][1](rng), Span(END_OF_TEXT)])
        made[kind] += len(joined(texts[-1]))
    rng.shuffle(texts)
    return texts


def encoded(tokenizer: Tokenizer, texts: Sequence[Spans]) -> Iterator[Document]:
    """Each document's tokens; a token has the weight of the span in which it starts."""
    for spans, encoding in zip(
        texts, tokenizer.encode_batch([joined(spans) for spans in texts]), strict=True
    ):
        weights = [round(span.weight * WEIGHT_UNIT) for span in spans]
        by_char = np.repeat(np.array(weights, np.uint8), [len(span.text) for span in spans])
        starts = np.array(encoding.offsets)[:, 0]
        yield Document(np.array(encoding.ids, np.uint16), by_char[starts])


def packed(texts: Iterator[Document], length: int) -> Rows:
    """Rows of `length` tokens, each filled from the next few documents that fit; what is left of a
    row weighs nothing.

    Documents longer than a row are left out.
    """
    waiting: list[Document] = []
    tokens, weights = [], []
    more = True
    while more or waiting:
        row, row_weights, used = np.full(length, END, np.uint16), np.zeros(length, np.uint8), 0
        while more and len(waiting) < OPEN_DOCUMENTS:
            document = next(texts, None)
            more = document is not None
            if document is not None and len(document.tokens) <= length:
                waiting.append(document)
        for document in tuple(waiting):
            stop = used + len(document.tokens)
            if stop <= length:
                row[used:stop], row_weights[used:stop], used = (
                    document.tokens,
                    document.weights,
                    stop,
                )
                waiting = [other for other in waiting if other is not document]
        if used:
            tokens.append(row)
            weights.append(row_weights)
    return Rows(np.array(tokens), np.array(weights))


def shard(tokenizer_json: str, seed: int, chars: int, lengths: Sequence[int]) -> list[Rows]:
    """The rows of one seed's documents, once for each row length."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    texts = list(encoded(tokenizer, documents(seed, chars)))
    return [packed(iter(texts), length) for length in lengths]


def corpus(
    tokenizer: Tokenizer, seeds: int, chars: int, lengths: Sequence[int], processes: int
) -> list[Rows]:
    """The rows of all seeds, for each row length, made by as many processes."""
    jobs = [(tokenizer.to_str(), seed, chars, lengths) for seed in range(seeds)]
    with get_context("spawn").Pool(processes) as pool:
        shards = pool.starmap(shard, jobs, chunksize=1)
    return [
        Rows(
            np.concatenate([rows.tokens for rows in same]),
            np.concatenate([rows.weights for rows in same]),
        )
        for same in zip(*shards, strict=True)
    ]
