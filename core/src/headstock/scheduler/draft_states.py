"""Pages for the states behind drafts, of which a row goes on from the right one.

A state has taken in every token that a step computed, rejected drafts too. So a step with drafts
also writes the states behind its tokens to pages of their own: in a row's page table the first
entry is its state, and entry 1 + i the state behind token i of such a step. What follows exchanges
two entries.
"""

from __future__ import annotations

from headstock.scheduler.page_pool import write_page_table
from headstock.scheduler.plan import Plan
from headstock.scheduler.row_counters import RowCounter, any_set
from headstock.scheduler.state import State
from headstock.spi.arrays import Ints


def follow_drafts(state: State, plan: Plan) -> None:
    """Note where rows of a plan with drafts verify some, and let the others go on.

    A row of one token goes on from the state behind it: its own page may have taken in padding.
    writes: row counters; the page tables, for the plan after this one
    """
    if not state.limits.keeps_state:
        return
    verify = plan.num_drafts > 0
    state.row_counters[RowCounter.VERIFIED_FROM, plan.rows[verify]] = plan.starts[verify]
    for row in plan.rows[plan.keeps_single].tolist():
        _exchange(state, row, 0)


def choose_states(state: State, rows: Ints) -> None:
    """Let rows that verified drafts go on from the state behind their last right token.

    rows: [n], whose counters say what is known of them by now
    writes: row counters, the page tables
    """
    if not state.limits.keeps_state:
        return
    counters = state.row_counters
    starts = counters[RowCounter.VERIFIED_FROM, rows]
    if not any_set(starts):
        return
    counters[RowCounter.VERIFIED_FROM, rows] = 0
    numbers = counters[RowCounter.NUM_COMPUTED, rows] - starts - 1
    for row, number in zip(rows[starts > 0].tolist(), numbers[starts > 0].tolist(), strict=True):
        _exchange(state, row, number)


def _exchange(state: State, row: int, number: int) -> None:
    """Make the state behind token `number` of the row's step the row's.   writes: page tables"""
    # Behind the last possible draft there is no page: nothing can come after it in a step.
    if number == state.limits.max_drafts:
        return
    for group in state.limits.state_groups:
        pages = state.table[group, row, [1 + number, 0]]
        write_page_table(state, group, row, 0, pages[:1])
        write_page_table(state, group, row, 1 + number, pages[1:])
