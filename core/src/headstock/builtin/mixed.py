"""The default scheduler: every decode row runs in every step, and prompts fill what is left of the
token budget.
"""

from __future__ import annotations

import numpy as np

from headstock.builtin.share import NONE, share_out
from headstock.spi.scheduler import Budget, Choice, View


def choose(view: View, budget: Budget) -> Choice:
    """Rows that want one token first, then longer wants by rank, cut to the budget; new requests
    when tokens are left.
    """
    rows = view.want.nonzero()[0]
    counts, total = view.want.take(rows), len(rows)
    if total > budget.tokens or np.count_nonzero(counts > 1):
        want = view.want.take(view.ranked)
        rows, counts = share_out(
            view, np.concatenate([view.ranked[want == 1], view.ranked[want > 1]]), budget.tokens
        )
        total = int(counts.sum())
    new = len(view.waiting_lengths)
    return Choice(
        rows=rows,
        counts=counts,
        admit=np.arange(new, dtype=np.int32) if new and total < budget.tokens else NONE,
    )
