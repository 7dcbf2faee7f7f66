"""The default scheduler: every decode row in every step, prompts in the rest of the budget."""

from __future__ import annotations

import numpy as np

from headstock.builtin.token_budget import NONE, split_budget
from headstock.spi.scheduler import Budget, ScheduleDecision, View


def schedule(view: View, budget: Budget) -> ScheduleDecision:
    """Run rows with one new token first, drafts aside, then rows with several, each by priority.

    The counts are cut to the token budget. New requests are admitted while tokens are left.
    """
    rows = view.num_new_tokens.nonzero()[0]
    counts, total = view.num_new_tokens.take(rows), len(rows)
    if total > budget.tokens or np.count_nonzero(counts > 1):
        # A row that verifies drafts decodes too, and must not wait behind a long prompt.
        num_new_tokens = (view.num_new_tokens - view.num_drafts).take(view.rows_by_priority)
        rows, counts = split_budget(
            view,
            np.concatenate(
                [
                    view.rows_by_priority[num_new_tokens == 1],
                    view.rows_by_priority[num_new_tokens > 1],
                ]
            ),
            budget.tokens,
        )
        total = int(counts.sum())
    new = len(view.waiting_lengths)
    return ScheduleDecision(
        rows=rows,
        counts=counts,
        admit=np.arange(new, dtype=np.int32) if new and total < budget.tokens else NONE,
    )
