"""Take states back to where a row was before drafts that turned out wrong.

A state has taken in every draft that a step computed. So it is copied before such a step, and comes
back if a draft is rejected. What was accepted is then computed again, in a step without drafts.
"""

from __future__ import annotations

from headstock.scheduler.page_pool import copy_page, count_available_pages, free_page, take_page
from headstock.scheduler.row_counters import RowCounter, any_set
from headstock.scheduler.state import State
from headstock.spi.arrays import Ints


def hold_backup(state: State, row: int) -> bool:
    """Return whether the row has pages to copy its state to, of which it takes some if it can.

    writes: backups
    """
    groups = state.limits.state_groups
    if not groups or row in state.backups:
        return True
    # Requests that may come need pages for their states.
    free_rows = state.limits.max_rows - state.num_running
    if any(count_available_pages(state, group) <= free_rows for group in groups):
        return False
    state.backups[row] = tuple(take_page(state, group) for group in groups)
    return True


def back_up_states(state: State, rows: Ints, starts: Ints) -> None:
    """Let this plan copy the states of rows that verify drafts, before its step.

    rows, starts: [n], the rows and where they are
    writes: row counters, copies
    """
    for row in rows.tolist() if state.limits.keeps_state else ():
        for group, page in zip(state.limits.state_groups, state.backups[row], strict=True):
            copy_page(state, group, int(state.table[group, row, 0]), page)
    state.row_counters[RowCounter.BACKUP, rows] = starts


def rewind_states(state: State, rows: Ints, num_computed: Ints) -> None:
    """Take rows back whose step computed more than what is known of them by now.

    rows: [n], some of which verified drafts
    num_computed: [n] int32, what they had computed then
    writes: row counters, copies
    """
    if not state.limits.keeps_state:
        return
    counters = state.row_counters
    backups = counters[RowCounter.BACKUP, rows]
    counters[RowCounter.BACKUP, rows] = 0
    is_wrong = (backups > 0) & (num_computed > counters[RowCounter.NUM_COMPUTED, rows])
    if not any_set(is_wrong):
        return
    counters[RowCounter.NUM_COMPUTED, rows[is_wrong]] = backups[is_wrong]
    for row in rows[is_wrong].tolist():
        for group, page in zip(state.limits.state_groups, state.backups[row], strict=True):
            copy_page(state, group, page, int(state.table[group, row, 0]))


def free_backup(state: State, row: int) -> None:
    """Free the pages of a row that leaves.   writes: backups"""
    pages = state.backups.pop(row, ())
    for group, page in zip(state.limits.state_groups if pages else (), pages, strict=True):
        free_page(state, group, page)
