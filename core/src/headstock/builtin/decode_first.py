"""Generation before prompts: even gaps between tokens, at the price of later first tokens."""

from __future__ import annotations

import numpy as np

from headstock.builtin.share import NONE, share_out
from headstock.spi.scheduler import Budget, Choice, View

PATIENCE = 8
"""Steps that prompts wait for decoding rows at most."""


def choose(view: View, budget: Budget) -> Choice:
    """Decoding rows alone while there are any, but in every `PATIENCE`th step prompts get what the
    budget leaves.
    """
    ready = view.rows_by_priority[view.want[view.rows_by_priority] > 0]
    decoding = view.computed[ready] >= view.prompt[ready]
    decode, prompts = ready[decoding], ready[~decoding]
    open_door = not len(decode) or view.number % PATIENCE == 0
    rows, counts = share_out(
        view, np.concatenate([decode, prompts]) if open_door else decode, budget.tokens
    )
    new = len(view.waiting_lengths)
    admit = open_door and new > 0 and int(counts.sum()) < budget.tokens
    return Choice(rows=rows, counts=counts, admit=np.arange(new, dtype=np.int32) if admit else NONE)
