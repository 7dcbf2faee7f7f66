"""Snapshots: copies of rows' states, which other rows go on from (docs/decisions/0052).

A state has taken in every token of its sequence and cannot go back, so a prefix is reused only
where a copy was made when the row was there. A step that computes a prompt writes the states amid
it to pages that its plan names. Of an answer the state is copied before the next step, as graphs of
decode steps are given no such pages.
"""

from __future__ import annotations

import numpy as np

from headstock.scheduler.page_pool import copy_page, count_available_pages, free_page, take_page
from headstock.scheduler.policy_answers import check_snapshot
from headstock.scheduler.row_counters import NONE, RowCounter, indices
from headstock.scheduler.state import Snapshot, State
from headstock.spi.arrays import Ints
from headstock.spi.cache import Match

LEAST_GAIN = 64
"""Tokens that the last snapshot of a prompt must be behind the one before."""


def mark_snapshots(state: State, row: int, match: Match) -> None:
    """Note at which of its prompt's tokens the row's state is copied, and with what it begins.

    writes: row counters, copies
    """
    limits, counters = state.limits, state.row_counters
    if not limits.snapshot_tokens:
        return
    cached, step = int(counters[RowCounter.NUM_COMPUTED, row]), limits.snapshot_step
    counters[RowCounter.NUM_SAVED, row] = cached
    # One token at least follows a match.
    last = (int(counters[RowCounter.NUM_PROMPT, row]) - 1) // step * step
    branch = min(match.num_known * limits.page_size // step * step, last)
    if branch > cached:
        counters[RowCounter.BRANCH, row] = branch
    regular = last // limits.snapshot_tokens * limits.snapshot_tokens
    if last - max(regular, branch, cached) >= LEAST_GAIN:
        counters[RowCounter.LAST_CUT, row] = last
    if cached:
        for group in limits.state_groups:
            copy_page(state, group, int(match.pages[group, -1]), int(state.table[group, row, 0]))


def find_next_cut(state: State, row: int, start: int) -> int:
    """Return the first position after `start` where the row's state is copied; 0 for none."""
    limits, counters = state.limits, state.row_counters
    if not limits.snapshot_tokens:
        return 0
    regular = (start // limits.snapshot_tokens + 1) * limits.snapshot_tokens
    known = (int(counters[at, row]) for at in (RowCounter.BRANCH, RowCounter.LAST_CUT))
    return min((cut for cut in (regular, *known) if cut > start), default=0)


def save_states(state: State, rows: Ints, starts: Ints, stops: Ints) -> Ints:
    """Let this plan's step save the states amid prompts at the cuts of `find_next_cut`.

    rows, starts, stops: [n], the interval of positions that each row computes
    returns: [m, 4] int32, as `Plan.saves`
    writes: row counters, snapshots
    """
    limits, counters = state.limits, state.row_counters
    if not limits.snapshot_tokens or limits.policy is None:
        return NONE
    saves: list[tuple[int, int, int, int]] = []
    num_prompt = counters[RowCounter.NUM_PROMPT].take(rows)
    for at in indices(starts < num_prompt - 1).tolist():
        row, cut = int(rows[at]), int(starts[at])
        while (cut := find_next_cut(state, row, cut)) and cut <= stops[at] and cut < num_prompt[at]:
            counters[RowCounter.NUM_SAVED, row] = cut
            pages = _take_pages(state, is_answer=False)
            if pages is not None:
                state.snapshots.setdefault(row, []).append(Snapshot(cut, pages))
                saves += [
                    (group, row, cut, page)
                    for group, page in zip(limits.state_groups, pages, strict=True)
                ]
    return np.array(saves, np.int32) if saves else NONE


def take_snapshots(state: State) -> None:
    """Let the next plan copy the states of rows whose answers have come to a multiple.

    The latest one of an answer stays.
    writes: copies, snapshots
    """
    limits, counters = state.limits, state.row_counters
    if not limits.snapshot_tokens or limits.policy is None:
        return
    computed = counters[RowCounter.NUM_COMPUTED]
    # Under overlap a state may hold a token that is not known to be the row's.
    there = (computed > counters[RowCounter.NUM_SAVED]) & (
        computed <= counters[RowCounter.NUM_KNOWN]
    )
    there &= (computed % limits.snapshot_step == 0) & (computed >= counters[RowCounter.NUM_PROMPT])
    for row in indices(there).tolist():
        counters[RowCounter.NUM_SAVED, row] = computed[row]
        _take_snapshot(state, row, int(computed[row]))


def _take_snapshot(state: State, row: int, num_tokens: int) -> None:
    """Copy the row's state, where there is a page for it.   writes: copies, snapshots"""
    limits, own = state.limits, state.snapshots.setdefault(row, [])
    num_prompt = state.row_counters[RowCounter.NUM_PROMPT, row]
    is_answer = num_tokens >= num_prompt
    has_one = is_answer and own and own[-1].num_tokens >= num_prompt
    pages = own.pop().pages if has_one else _take_pages(state, is_answer=is_answer)
    if pages is None:
        return
    for group, page in zip(limits.state_groups, pages, strict=True):
        copy_page(state, group, int(state.table[group, row, 0]), page)
    own.append(Snapshot(num_tokens, pages))


def _take_pages(state: State, *, is_answer: bool) -> tuple[int, ...] | None:
    """Return a page of each group with a state for a copy; None where one has none to spare."""
    groups = state.limits.state_groups
    if not all(_has_page(state, group, is_answer=is_answer) for group in groups):
        return None
    return tuple(take_page(state, group) for group in groups)


def _has_page(state: State, group: int, *, is_answer: bool) -> bool:
    """Return whether a row may take a page of a group for a copy."""
    limits = state.limits
    # Requests that may come need pages for their states.
    reserve = (limits.max_rows - state.num_running) * limits.state_pages
    if is_answer:
        # A row holds this page until it ends. With all of them held, no prompt could leave any.
        reserve += (limits.num_pages[group] - limits.max_rows * limits.state_pages) // 2
    return count_available_pages(state, group) > reserve


def index_snapshots(state: State) -> None:
    """Give the index the snapshots of prompts whose tokens it has.   writes: snapshots"""
    for row in list(state.snapshots):
        num_prompt = int(state.row_counters[RowCounter.NUM_PROMPT, row])
        state.snapshots[row] = [
            snapshot
            for snapshot in state.snapshots[row]
            if snapshot.num_tokens >= num_prompt or not _index_snapshot(state, row, snapshot)
        ]
        if not state.snapshots[row]:
            del state.snapshots[row]


def settle_snapshots(state: State, row: int) -> None:
    """Give the index the snapshots of a row that leaves, and free what it cannot have.

    writes: copies, snapshots
    """
    limits, counters = state.limits, state.row_counters[:, row]
    num_tokens = int(counters[RowCounter.NUM_COMPUTED])
    is_last = counters[RowCounter.NUM_SAVED] < num_tokens < counters[RowCounter.NUM_KNOWN]
    if limits.snapshot_tokens and is_last and num_tokens % limits.snapshot_step == 0:
        # No step followed the one that came there. The copy is made before the page is written.
        _take_snapshot(state, row, num_tokens)
    for snapshot in state.snapshots.pop(row, ()):
        if not _index_snapshot(state, row, snapshot):
            for group, page in zip(state.limits.state_groups, snapshot.pages, strict=True):
                free_page(state, group, page)


def _index_snapshot(state: State, row: int, snapshot: Snapshot) -> bool:
    """Give the index a snapshot, if it has the tokens before it; return whether it has."""
    limits = state.limits
    num_pages = snapshot.num_tokens // limits.page_size
    if limits.policy is None or state.row_counters[RowCounter.NUM_INDEXED, row] < num_pages:
        return False
    pages = np.zeros(len(limits.groups), np.int32)
    pages[list(limits.state_groups)] = snapshot.pages
    kept = check_snapshot(
        limits,
        limits.policy.add_snapshot(state.index, state.handles[row], num_pages, pages),
        pages,
    )
    for group in limits.state_groups:
        if kept[group] != pages[group]:
            free_page(state, group, int(pages[group]))
        else:
            state.refs[group][pages[group]] = 0
    return True


def list_copies(state: State, group: int) -> Ints:
    """Return the pages of a state group that rows hold beside their own states, [n] int64."""
    at = state.limits.state_groups.index(group)
    own = (snapshot.pages for snapshots in state.snapshots.values() for snapshot in snapshots)
    return np.array([pages[at] for pages in own], np.int64)
