"""Generation before prompts: even gaps between tokens, at the price of later first tokens."""

from __future__ import annotations

import numpy as np

from headstock.spi.scheduler import NONE, Budget, Choice, View

PATIENCE = 8
"""Steps that a prompt waits for decoding rows at most."""


def choose(view: View, budget: Budget) -> Choice:
    """Decoding rows alone while there are any, but in every `PATIENCE`th step prompts get what the budget leaves."""
    decode = np.flatnonzero((view.want > 0) & view.decoding)
    prompts = np.flatnonzero((view.want > 0) & ~view.decoding)
    new = len(view.waiting_lengths)
    door_open = not len(decode) or view.number % PATIENCE == 0
    order = np.concatenate([decode, prompts]) if door_open else decode
    counts = np.diff(np.minimum(np.cumsum(view.want[order]), budget.tokens), prepend=0).astype(np.int32)
    some = counts > 0
    left = budget.tokens - int(counts.sum())
    admit = np.arange(new, dtype=np.int32) if door_open and left > 0 and new else NONE
    return Choice(rows=view.rows[order][some], counts=counts[some], admit=admit)
