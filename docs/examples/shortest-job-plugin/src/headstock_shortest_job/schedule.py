"""The least work first: short answers come early, and long ones age until they are as short."""

from __future__ import annotations

import numpy as np

from headstock.spi import Budget, RequestColumns, ScheduleDecision, View

TOKENS_PER_SECOND = 50
"""How much shorter a request counts for each second that it waits.

So none starves: one of 1,000 tokens goes before all that come 20 seconds later.
"""


def schedule(view: View, budget: Budget) -> ScheduleDecision:
    """Give the step's tokens to rows and waiting requests, those with the least work left first.

    Higher priorities go before that. Core would take the row of a request back for one of higher
    priority, so an order of its own would have the two take turns.
    """
    running, waiting = view.list_running(), view.list_waiting()
    rows = view.rows_by_priority[view.num_new_tokens[view.rows_by_priority] > 0]
    work = count_work(running) - view.num_computed_tokens
    # No more than there are rows for: what a request gets that is not admitted would be lost.
    waiting_work = count_work(waiting)
    admitted = np.lexsort((waiting_work, -waiting.priorities))[: budget.free_rows]

    wanted = np.concatenate([view.num_new_tokens[rows], waiting.lengths[admitted]])
    priorities = np.concatenate([running.priorities[rows], waiting.priorities[admitted]])
    order = np.lexsort((np.concatenate([work[rows], waiting_work[admitted]]), -priorities))
    counts = np.zeros(len(wanted), np.int32)
    counts[order] = np.diff(np.minimum(np.cumsum(wanted[order]), budget.tokens), prepend=0)
    of_rows, of_admitted = counts[: len(rows)], counts[len(rows) :]
    return ScheduleDecision(
        rows=rows[of_rows > 0],
        counts=of_rows[of_rows > 0],
        admit=np.sort(admitted[of_admitted > 0]).astype(np.int32),
    )


def count_work(requests: RequestColumns) -> np.ndarray:
    """The tokens of whole requests, less what their wait counts for, [requests] float64.

    What the prefix index will spare is not known before a request is admitted. An answer is taken
    to be as long as it may be.
    """
    tokens = requests.num_prompt_tokens + requests.max_tokens
    work: np.ndarray = tokens - requests.waits * (TOKENS_PER_SECOND / 1000)
    return work
