"""Equal shares for users who have work, however much more one of them sends."""

from __future__ import annotations

import numpy as np

from headstock.spi import Budget, RequestColumns, ScheduleDecision, View

PATIENCE_MS = 2_000
"""Milliseconds that a user without a row waits before one of another's rows gives way."""


def schedule(view: View, budget: Budget) -> ScheduleDecision:
    """Share rows and tokens of the step evenly among users; requests without one count as a user.

    A user who wants less than a share leaves the rest to the others. Of one user's requests those
    of higher priority go first, then earlier ones.
    """
    running, waiting = view.list_running(), view.list_waiting()
    rows = view.rows_by_priority
    admit = choose_waiting(view, budget.free_rows, running, waiting)
    victims = choose_victim(rows, budget, running, waiting)
    rows = rows[(view.num_new_tokens[rows] > 0) & ~np.isin(rows, victims)]

    users = np.unique(np.concatenate([running.users[rows], waiting.users[admit]]))
    demands = np.array(
        [
            view.num_new_tokens[rows][running.users[rows] == user].sum()
            + waiting.lengths[admit][waiting.users[admit] == user].sum()
            for user in users
        ]
    )
    counts = np.zeros(len(rows), np.int32)
    for user, share in zip(users, share_tokens(demands, budget.tokens, view.step), strict=True):
        own = np.flatnonzero(running.users[rows] == user)
        # Rows that decode go before the user's prompts. What rows leave is for the admitted ones.
        own = own[np.argsort(view.num_new_tokens[rows[own]] > 1, kind="stable")]
        totals = np.minimum(np.cumsum(view.num_new_tokens[rows[own]]), share)
        counts[own] = np.diff(totals, prepend=0)
    # Core serves them in queue order, so the user who sends most would take the shares of others.
    if len(users) > 1 and waiting.lengths[admit].sum() > budget.tokens - counts.sum():
        admit = choose_waiting(view, 1, running, waiting)
    return ScheduleDecision(
        rows=rows[counts > 0], counts=counts[counts > 0], admit=admit, victims=victims
    )


def share_tokens(demands: np.ndarray, tokens: int, step: int) -> np.ndarray:
    """Split the tokens evenly; what one does not want is split among the others.

    demands, result: [users]
    """
    shares, left = np.zeros(len(demands), np.int64), tokens
    for turn, user in enumerate(np.argsort(demands, kind="stable").tolist()):
        others = len(demands) - turn
        # A remainder goes round with the steps: it would add up if it were always the same user's.
        shares[user] = min(int(demands[user]), (left + step % others) // others)
        left -= int(shares[user])
    return shares


def choose_waiting(
    view: View, most: int, running: RequestColumns, waiting: RequestColumns
) -> np.ndarray:
    """The queue positions of the next request of the user with the fewest rows, and so on.

    Between users with equally many rows, the one with fewer tokens in them goes first.
    """
    at_work = running.users[view.rows_by_priority]
    tokens = view.num_computed_tokens[view.rows_by_priority]
    num_rows = np.zeros(len(waiting.users), np.int64)
    in_rows = np.zeros(len(waiting.users), np.int64)
    for user in np.unique(waiting.users):
        own = waiting.users == user
        num_rows[own] = np.count_nonzero(at_work == user) + np.arange(np.count_nonzero(own))
        in_rows[own] = tokens[at_work == user].sum()
    # Priorities first: core would take a row back for a request of higher priority.
    order = np.lexsort((np.arange(len(num_rows)), in_rows, num_rows, -waiting.priorities))
    return np.sort(order[:most]).astype(np.int32)


def choose_victim(
    rows: np.ndarray, budget: Budget, running: RequestColumns, waiting: RequestColumns
) -> np.ndarray:
    """The row that gives way to a user who waits too long for a first one: [0 or 1]

    It is the last one in priority of the user who has most, and at least two.
    """
    has_row = np.isin(waiting.users, running.users[rows])
    overdue = np.flatnonzero(~has_row & (waiting.waits >= PATIENCE_MS))
    if budget.free_rows or not len(overdue):
        return rows[:0]
    owners, counts = np.unique(running.users[rows], return_counts=True)
    last = rows[running.users[rows] == owners[counts.argmax()]][-1:]
    may_give_way = running.priorities[last] <= waiting.priorities[overdue].max()
    return last[may_give_way] if counts.max() > 1 else rows[:0]
