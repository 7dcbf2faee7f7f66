"""Prompt lookup: a sequence is likely to continue as it did after the same tokens earlier."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headstock.spi import Proposer
from headstock.spi.arrays import Ints
from headstock_ngram_proposer.options import NgramOptions

BYTES = 4
"""Bytes of a token."""


class NgramProposer(Proposer):
    """Proposes the tokens that followed the last earlier occurrence of the latest tokens."""

    def __init__(self, options: NgramOptions) -> None:
        self.options = options

    @property
    def max_drafts(self) -> int:
        """Set the options."""
        return self.options.max_drafts

    def propose(self, tokens: Sequence[Ints], room: Ints, ids: Ints) -> tuple[Ints, Ints]:
        """Guess the next tokens of each row; none if the latest tokens have no earlier
        occurrence."""
        drafts = [
            self._continue_row(row, count) for row, count in zip(tokens, room.tolist(), strict=True)
        ]
        counts = np.array([len(draft) for draft in drafts], np.int32)
        return counts, np.concatenate([np.zeros(0, np.int32), *drafts])

    def _continue_row(self, tokens: Ints, room: int) -> Ints:
        """Return the guesses after the tokens, at most `room`."""
        # Bytes: their search is in C, 20 times as fast as windows in numpy.
        data, start = tokens.tobytes(), -1
        # The shortest first: for most rows it does not occur, and then no longer one does.
        for length in range(self.options.min_match, self.options.max_match + 1):
            earlier = find_last(data, length)
            if earlier < 0:
                break
            start = earlier + length
        if start < 0:
            return tokens[:0]
        # A match that reaches the end repeats with its distance as the period.
        period = len(tokens) - start
        return tokens[start + np.arange(room) % period]


def find_last(data: bytes, length: int) -> int:
    """Find the last earlier occurrence of the last `length` tokens; -1 if there is none.

    data: tokens of `BYTES` bytes each
    """
    if len(data) <= length * BYTES:
        return -1
    suffix, stop = data[-length * BYTES :], len(data) - BYTES
    while (at := data.rfind(suffix, 0, stop)) >= 0:
        if at % BYTES == 0:
            return at // BYTES
        # A match across token boundaries does not count; the search continues before it.
        stop = at + len(suffix) - 1
    return -1
