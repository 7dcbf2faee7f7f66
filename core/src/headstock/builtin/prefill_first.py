"""Prompts before generation: the shortest time to first tokens, at the price of uneven gaps between later ones."""

from __future__ import annotations

import numpy as np

from headstock.spi.scheduler import NONE, Budget, Choice, View

PATIENCE = 4
"""Steps that a decoding row waits for prompts at most."""


def choose(view: View, budget: Budget) -> Choice:
    """Prompt chunks alone while there are any, but rows that waited `PATIENCE` steps to decode go first.

    A step of prompts holds no decoding rows at all, so that it stays short of kernels; bounded waiting keeps decoding alive.
    """
    decode = np.flatnonzero((view.want > 0) & view.decoding)
    prompts = np.flatnonzero((view.want > 0) & ~view.decoding)
    starved = len(decode) > 0 and int(view.idle[decode].max()) >= PATIENCE
    new = len(view.waiting_lengths)
    if starved or not (len(prompts) or new):
        order = np.concatenate([decode, prompts])
    elif len(prompts):
        order = prompts
    else:
        order = NONE
    counts = np.diff(np.minimum(np.cumsum(view.want[order]), budget.tokens), prepend=0).astype(np.int32)
    some = counts > 0
    left = budget.tokens - int(counts.sum())
    admit = np.arange(new, dtype=np.int32) if left > 0 and new else NONE
    return Choice(rows=view.rows[order][some], counts=counts[some], admit=admit)
