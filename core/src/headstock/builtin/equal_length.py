"""Rows of equal length together: every step is a batch without padding, at the price of uneven gaps between tokens."""

from __future__ import annotations

import numpy as np

from headstock.builtin.share import share_out
from headstock.spi.scheduler import NONE, Budget, Choice, View

PATIENCE = 4
"""Steps that a row waits for shorter ones before it gets its turn."""


def choose(view: View, budget: Budget) -> Choice:
    """One new request, or else the rows of one length, a number of computed tokens: the shortest, which have steps to
    make alone in any order, until they have caught up with the next and go on with them.

    A new request starts where a cached prefix ends, which nobody knows before it is seated, so it is seated alone.
    Rows that waited `PATIENCE` steps go first, the longest wait first, but a new request gets every `PATIENCE`th step:
    with n rows nobody waits for more than `PATIENCE + 2 * n` steps.
    """
    ready = view.ranked[view.want[view.ranked] > 0]
    waits = view.number - view.last_run[ready]
    patient = not len(ready) or int(waits.max()) <= PATIENCE
    if len(view.waiting_lengths) and (patient or view.number % PATIENCE == 0):
        return Choice(rows=NONE, counts=NONE, admit=np.zeros(1, np.int32))
    if not len(ready):
        return Choice(rows=NONE, counts=NONE)
    lengths = view.computed[ready]
    length = lengths.min() if patient else lengths[waits.argmax()]
    rows, counts = share_out(view, ready[lengths == length], budget.tokens)
    return Choice(rows=rows, counts=counts)
