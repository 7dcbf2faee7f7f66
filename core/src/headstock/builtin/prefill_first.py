"""Prompts before generation: early first tokens, at the price of uneven gaps between later ones."""

from __future__ import annotations

import numpy as np

from headstock.builtin.token_budget import NONE, split_budget
from headstock.spi.scheduler import Budget, ScheduleDecision, View

PATIENCE = 4
"""Steps that a decode row waits for prompts at most."""


def schedule(view: View, budget: Budget) -> ScheduleDecision:
    """Run prompt chunks alone while there are any.

    Once a decode row has waited `PATIENCE` steps, decode rows go first. A step of prompts holds no
    decode rows, so that it takes no longer than its prompts.
    """
    ready = view.rows_by_priority[view.num_new_tokens[view.rows_by_priority] > 0]
    decoding = view.num_computed_tokens[ready] >= view.num_prompt_tokens[ready]
    decode, prompts = ready[decoding], ready[~decoding]
    starved = len(decode) > 0 and view.step - int(view.last_step[decode].min()) > PATIENCE
    new = len(view.waiting_lengths)
    rows = prompts
    if starved or not (len(prompts) or new):
        rows = np.concatenate([decode, prompts])
    rows, counts = split_budget(view, rows, budget.tokens)
    may_admit = new > 0 and int(counts.sum()) < budget.tokens
    return ScheduleDecision(
        rows=rows, counts=counts, admit=np.arange(new, dtype=np.int32) if may_admit else NONE
    )
