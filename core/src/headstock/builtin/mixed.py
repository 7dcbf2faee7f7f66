"""The default scheduler: every decode row in every step, prompts in the rest of the budget."""

from __future__ import annotations

import numpy as np

from headstock.builtin.token_budget import NONE, split_budget
from headstock.spi.arrays import Ints
from headstock.spi.scheduler import Budget, ScheduleDecision, View


def schedule(view: View, budget: Budget) -> ScheduleDecision:
    """Run rows with one new token first, drafts aside, then rows with several, each by priority.

    The counts are cut to the token budget. New requests are admitted while tokens are left. In
    bounded steps short prompts go ahead of long ones, as `_find_short_prompts` says.
    """
    rows = view.num_new_tokens.nonzero()[0]
    counts, total = view.num_new_tokens.take(rows), len(rows)
    new = len(view.waiting_lengths)
    admit = np.arange(new, dtype=np.int32) if new else NONE
    if total > budget.tokens or np.count_nonzero(counts > 1) or (new and budget.is_bounded):
        # A row that verifies drafts decodes too, and must not wait behind a long prompt.
        num_new_tokens = (view.num_new_tokens - view.num_drafts).take(view.rows_by_priority)
        decoding = view.rows_by_priority[num_new_tokens == 1]
        prompts = view.rows_by_priority[num_new_tokens > 1]
        tokens = budget.tokens
        if new and budget.is_bounded:
            left = tokens - int(view.num_new_tokens[decoding].sum())
            short, num_tokens = _find_short_prompts(view, budget, prompts, left)
            if len(short):
                admit, tokens = short, tokens - num_tokens
        rows, counts = split_budget(view, np.concatenate([decoding, prompts]), tokens)
        total = int(counts.sum())
    return ScheduleDecision(
        rows=rows, counts=counts, admit=admit if total < budget.tokens else NONE
    )


def _find_short_prompts(view: View, budget: Budget, prompts: Ints, tokens: int) -> tuple[Ints, int]:
    """Find waiting requests that go ahead of longer ones, and count their tokens.

    A request that fits into half of what a step has for prompts need not wait until long ones
    before it are computed. These get the other half, or, where none of them has a row, every
    second step. So neither waits long for the other. What long ones leave of a step is for short
    ones too.

    prompts: rows with prompt tokens to compute
    tokens: of the step, beside its decode rows
    returns: their positions in the queue, ascending; none where the queue's order is to stand
    """
    if tokens < 2 or (not len(prompts) and view.step % 2):
        return NONE, 0
    waiting = view.list_waiting()
    rest = int(view.num_new_tokens[prompts].sum())
    lowest = int(view.waiting_priorities[0])
    if len(prompts):
        lowest = max(lowest, int(view.list_running().priorities[prompts].max()))
    is_short = (waiting.lengths <= tokens // 2) & (waiting.priorities >= lowest)
    if is_short[0] and rest <= tokens // 2:
        return NONE, 0  # the queue's order leaves half of the step to short ones, too
    positions = np.flatnonzero(is_short)[: budget.free_rows]
    room = max(tokens // 2, tokens - rest)
    positions = positions[np.cumsum(waiting.lengths[positions]) <= room]
    # The first of the queue may wait for pages. Enough are left for it, or it would starve.
    pages = -(-waiting.lengths // budget.page_size) + 1
    if int(pages[positions].sum()) + int(pages[0]) > max(budget.pages, default=0):
        return NONE, 0
    return positions.astype(np.int32), int(waiting.lengths[positions].sum())
