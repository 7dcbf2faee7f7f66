"""Proposers that are each wrong in one way."""

from __future__ import annotations

from typing import Any

import numpy as np

from headstock.spi import Proposer


class Guesses(Proposer):
    """One draft a row, always the token 5."""

    @property
    def max_drafts(self) -> int:
        return 2

    def propose(self, tokens: Any, room: Any, ids: Any) -> Any:
        counts = np.ones(len(tokens), np.int32)
        return counts, np.full(len(tokens), 5, np.int32)


class NoDrafts(Guesses):
    @property
    def max_drafts(self) -> int:
        return 0


class Raises(Guesses):
    def propose(self, tokens: Any, room: Any, ids: Any) -> Any:
        raise IndexError("list index out of range")


class ReturnsList(Guesses):
    def propose(self, tokens: Any, room: Any, ids: Any) -> Any:
        return [[5] for _ in tokens]


class UnknownToken(Guesses):
    def propose(self, tokens: Any, room: Any, ids: Any) -> Any:
        counts, drafts = super().propose(tokens, room, ids)
        return counts, drafts + 5000


class TooMany(Guesses):
    def propose(self, tokens: Any, room: Any, ids: Any) -> Any:
        return room + 1, np.full(int(room.sum()) + len(room), 5, np.int32)


class WritesTokens(Guesses):
    def propose(self, tokens: Any, room: Any, ids: Any) -> Any:
        tokens[0][-1] = 0
        return super().propose(tokens, room, ids)
