"""Rows of equal length together: batches without padding, at the price of uneven gaps."""

from __future__ import annotations

import numpy as np

from headstock.builtin.token_budget import NONE, split_budget
from headstock.spi.scheduler import Budget, ScheduleDecision, View

TURN = 4
"""In every `TURN`th step the row that waited longest goes first."""


def schedule(view: View, budget: Budget) -> ScheduleDecision:
    """Admit one new request, or else run the rows of one length, in computed tokens.

    That is the shortest length: its rows have to catch up with the next before they run together,
    and those steps they make alone in any order. A new request starts where a cached prefix ends.
    Only its admission shows where, so it is admitted alone. With n rows, none waits for more than
    `TURN * (n + 1)` steps.
    """
    ready = view.rows_by_priority[view.num_new_tokens[view.rows_by_priority] > 0]
    waits = view.step - view.last_step[ready]
    turn = view.step % TURN == 0 and len(ready) > 0 and int(waits.max()) > TURN
    if len(view.waiting_lengths) and not turn:
        return ScheduleDecision(rows=NONE, counts=NONE, admit=np.zeros(1, np.int32))
    if not len(ready):
        return ScheduleDecision(rows=NONE, counts=NONE)
    lengths = view.num_computed_tokens[ready]
    length = lengths[waits.argmax()] if turn else lengths.min()
    rows, counts = split_budget(view, ready[lengths == length], budget.tokens)
    return ScheduleDecision(rows=rows, counts=counts)
