"""The default scheduler: every decode row runs in every step, and prompts fill what is left of the token budget."""

from __future__ import annotations

import numpy as np

from headstock.spi.scheduler import NONE, Budget, Choice, View


def choose(view: View, budget: Budget) -> Choice:
    """Rows that want one token first, then longer wants by rank, cut to the budget; new requests when tokens are left."""
    want = view.want
    if len(want) <= budget.tokens and (want == 1).all():
        rows, counts = view.rows, want
    else:
        rows, counts = share_out(view, budget.tokens)
    left = budget.tokens - int(counts.sum())
    admit = np.arange(len(view.waiting_lengths), dtype=np.int32) if left > 0 else NONE
    return Choice(rows=rows, counts=counts, admit=admit)


def share_out(view: View, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Deal `tokens` out to the rows: those that want one first, the others by rank."""
    want = view.want
    order = np.concatenate([np.flatnonzero(want == 1), np.flatnonzero(want > 1)])
    taken = np.minimum(np.cumsum(want[order]), tokens)
    counts = np.diff(taken, prepend=0).astype(np.int32)
    some = counts > 0
    return view.rows[order][some], counts[some]
