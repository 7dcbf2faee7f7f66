"""Prompts before generation: the shortest time to first tokens, at the price of uneven gaps between
later ones.
"""

from __future__ import annotations

import numpy as np

from headstock.builtin.share import NONE, share_out
from headstock.spi.scheduler import Budget, Choice, View

PATIENCE = 4
"""Steps that a decoding row waits for prompts at most."""


def choose(view: View, budget: Budget) -> Choice:
    """Prompt chunks alone while there are any, but once a decoding row has waited `PATIENCE` steps,
    those go first.

    A step of prompts holds no decoding rows, so that it takes no longer than its prompts; bounded
    waiting keeps decoding alive.
    """
    ready = view.rows_by_priority[view.want[view.rows_by_priority] > 0]
    decoding = view.computed[ready] >= view.prompt[ready]
    decode, prompts = ready[decoding], ready[~decoding]
    starved = len(decode) > 0 and view.number - int(view.last_run[decode].min()) > PATIENCE
    new = len(view.waiting_lengths)
    rows = prompts
    if starved or not (len(prompts) or new):
        rows = np.concatenate([decode, prompts])
    rows, counts = share_out(view, rows, budget.tokens)
    open_door = new > 0 and int(counts.sum()) < budget.tokens
    return Choice(
        rows=rows, counts=counts, admit=np.arange(new, dtype=np.int32) if open_door else NONE
    )
