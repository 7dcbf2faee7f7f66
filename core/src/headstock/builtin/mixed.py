"""The default scheduler: every decode row runs in every step, and prompts fill what is left of the
token budget.
"""

from __future__ import annotations

import numpy as np

from headstock.builtin.share import NONE, share_out
from headstock.spi.scheduler import Budget, Choice, View


def choose(view: View, budget: Budget) -> Choice:
    """Run rows with one new token first, then rows with several, each by priority.

    The counts are cut to the token budget. New requests are admitted while tokens are left.
    """
    rows = view.want.nonzero()[0]
    counts, total = view.want.take(rows), len(rows)
    if total > budget.tokens or np.count_nonzero(counts > 1):
        want = view.want.take(view.rows_by_priority)
        rows, counts = share_out(
            view,
            np.concatenate([view.rows_by_priority[want == 1], view.rows_by_priority[want > 1]]),
            budget.tokens,
        )
        total = int(counts.sum())
    new = len(view.waiting_lengths)
    return Choice(
        rows=rows,
        counts=counts,
        admit=np.arange(new, dtype=np.int32) if new and total < budget.tokens else NONE,
    )
