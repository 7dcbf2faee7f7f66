"""Generation before prompts: even gaps between tokens, at the price of later first tokens."""

from __future__ import annotations

import numpy as np

from headstock.builtin.token_budget import NONE, split_budget
from headstock.spi.scheduler import Budget, ScheduleDecision, View

PATIENCE = 8
"""Steps that prompts wait for decode rows at most."""


def schedule(view: View, budget: Budget) -> ScheduleDecision:
    """Run decode rows alone while there are any.

    In every `PATIENCE`th step prompts get the rest of the token budget.
    """
    ready = view.rows_by_priority[view.num_new_tokens[view.rows_by_priority] > 0]
    decoding = view.num_computed_tokens[ready] >= view.num_prompt_tokens[ready]
    decode, prompts = ready[decoding], ready[~decoding]
    admits_prompts = not len(decode) or view.step % PATIENCE == 0
    rows, counts = split_budget(
        view, np.concatenate([decode, prompts]) if admits_prompts else decode, budget.tokens
    )
    new = len(view.waiting_lengths)
    admit = admits_prompts and new > 0 and int(counts.sum()) < budget.tokens
    return ScheduleDecision(
        rows=rows, counts=counts, admit=np.arange(new, dtype=np.int32) if admit else NONE
    )
