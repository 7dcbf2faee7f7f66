"""Invariants that hold after every step; debug runs and tests check them."""

from __future__ import annotations

import numpy as np

from headstock.scheduler.limits import Limits
from headstock.scheduler.policy_answers import count_indexed
from headstock.scheduler.row_counters import NONE, RowCounter, count_drafts, is_special
from headstock.scheduler.snapshots import list_copies
from headstock.scheduler.state import State


class IndexContradiction(AssertionError):
    """The prefix index and the pages of rows contradict each other: the cache plugin's fault."""


def check_state(state: State, limits: Limits) -> None:
    """Raise AssertionError with a reason when the state contradicts itself."""
    for group in range(len(limits.groups)):
        _check_pages(state, limits, group)
    _check_rows(state, limits)
    _check_names(state)
    keys = [request_state.priority_key for request_state in state.waiting]
    assert keys == sorted(keys), "the queue is not in priority order"
    if limits.policy is not None:
        limits.policy.check_index(state.index)


def _check_pages(state: State, limits: Limits, group: int) -> None:
    """Check that free + held + cached == total, and that rows share indexed pages only."""
    total = limits.num_pages[group]
    held_pages = np.concatenate(state.pages[group])
    if group in limits.state_groups:
        held_pages = np.concatenate((held_pages, list_copies(state, group)))
    assert (held_pages > 0).all(), f"group {group}: a row holds the dummy page"
    refs = np.bincount(held_pages, minlength=total + 1)
    assert (refs == state.refs[group]).all(), (
        f"group {group}: reference counts do not match the rows"
    )
    free = np.bincount(np.concatenate([NONE, *state.free[group]]), minlength=total + 1)
    assert free.sum() == state.num_free[group], f"group {group}: the free pages are miscounted"
    indexed = np.zeros(total + 1, np.int64)
    if limits.policy is not None:
        numbers = limits.policy.indexed_pages(state.index, group)
        indexed = np.bincount(numbers, minlength=total + 1)
        unheld = np.count_nonzero(refs[numbers] == 0)
        evictable = limits.policy.count_evictable(state.index, group)
        if evictable != unheld:
            raise IndexContradiction(
                f"group {group}: {evictable} pages can be evicted, and no row holds {unheld} of "
                "the indexed ones"
            )
    region_pages = np.array([region.pages[group] for region in state.regions], np.int64)
    assert not refs[region_pages].any(), (
        f"group {group}: a row holds a region that is kept for another"
    )
    indexed += np.bincount(region_pages, minlength=total + 1)
    assert len(free) == len(refs) == len(indexed) == total + 1, (
        f"group {group}: a page number is past the pool"
    )
    assert free[0] == refs[0] == indexed[0] == 0, f"group {group}: the dummy page was handed out"
    assert free.max() <= 1 and indexed.max() <= 1, f"group {group}: a page is free or indexed twice"
    assert not (free.astype(bool) & ((refs > 0) | (indexed > 0))).any(), (
        f"group {group}: a free page is in use"
    )
    assert ((free > 0) | (refs > 0) | (indexed > 0))[1:].all(), f"group {group}: a page is lost"
    shared = refs > 1
    assert (indexed[shared] > 0).all(), (
        f"group {group}: rows share a page that the index does not know"
    )


def _check_names(state: State) -> None:
    """Check that the names in use are those of the requests, each with a unique number."""
    entries = [*state.waiting, *filter(None, state.requests_by_row)]
    for kind, table in (("user", state.users), ("adapter", state.adapters)):
        used = dict.fromkeys(table.counts, 0)
        for entry in entries:
            name, number = getattr(entry.request, kind), getattr(entry, kind)
            assert number == table.numbers.get(name, 0), (
                f"{kind} {name!r} has two numbers: {number} and {table.numbers.get(name, 0)}"
            )
            used[name] = used.get(name, 0) + bool(name)
        used.pop("", None)
        assert used == table.counts, f"the {kind}s are miscounted: {table.counts} and not {used}"
        numbers = sorted([*table.numbers.values(), *table.free])
        assert numbers == list(range(1, len(numbers) + 1)), f"{kind}s share a number"


def _check_rows(state: State, limits: Limits) -> None:
    """Check that counters agree with each other and with the pages that rows hold."""
    counters, live = state.row_counters, state.pages
    for row, request_state in enumerate(state.requests_by_row):
        values = counters[:, row]
        if request_state is None:
            assert not values.any() and state.handles[row] is None, (
                f"free row {row} keeps something"
            )
            assert not any(len(pages[row]) for pages in live), f"free row {row} holds pages"
            continue
        num_known, computed, tokens = (
            int(values[c])
            for c in (RowCounter.NUM_KNOWN, RowCounter.NUM_COMPUTED, RowCounter.NUM_TOKENS)
        )
        assert computed <= tokens <= values[RowCounter.LAST_POSITION] + 1, (
            f"row {row} is past its end"
        )
        assert num_known <= tokens, f"row {row} knows more tokens than it has"
        assert num_known <= values[RowCounter.LAST_POSITION], f"row {row} should have ended"
        for group in range(len(limits.groups)):
            span = int(state.spans[group, row])
            assert span * limits.page_tokens[group] >= computed, (
                f"row {row} computed tokens without a page of group {group}"
            )
        token_spans = np.delete(state.spans[:, row], list(limits.state_groups))
        assert (values[RowCounter.NUM_INDEXED] <= token_spans).all(), (
            f"row {row} indexed more pages than it holds"
        )
    special = np.count_nonzero(is_special(counters))
    assert state.may_draft or not (
        count_drafts(counters).any() or counters[RowCounter.HELD].any()
    ), "rows have drafts or are held, and no step looks for them"
    assert state.num_special == special, (
        f"{state.num_special} rows wait for a sample, report prompt logprobs or pool, and not "
        f"{special}"
    )
    assert set(state.rows_by_priority.tolist()) == set(
        np.flatnonzero(counters[RowCounter.ACTIVE]).tolist()
    ), "rows_by_priority is stale"


def check_idle(state: State, limits: Limits) -> None:
    """Raise AssertionError with a reason unless an idle engine holds nothing but cached pages.

    No loop runs over the index, so a large one costs nothing.
    """
    occupied = [
        row for row, request_state in enumerate(state.requests_by_row) if request_state is not None
    ]
    assert not occupied, f"row {occupied[0]} still has a request"
    assert not state.row_counters.any(), (
        f"row {int(np.nonzero(state.row_counters)[1][0])} still counts something"
    )
    for group, total in enumerate(limits.num_pages):
        held_pages = np.flatnonzero(state.refs[group])
        assert not len(held_pages), (
            f"group {group}: page {held_pages[0]} is still held, one of {len(held_pages)}"
        )
        free = np.concatenate([NONE, *state.free[group]])
        assert len(free) == state.num_free[group], f"group {group}: the free pages are miscounted"
        assert not len(free) or 0 < free.min() <= free.max() <= total, (
            f"group {group}: a free page is not in the pool"
        )
        assert len(free) == np.count_nonzero(np.bincount(free)), (
            f"group {group}: a page is free twice"
        )
        cached = len(state.regions)
        if limits.policy is not None:
            indexed, evictable = (
                count_indexed(limits, limits.policy, state.index)[group],
                limits.policy.count_evictable(state.index, group),
            )
            if indexed != evictable:
                raise IndexContradiction(
                    f"group {group}: {indexed - evictable} of {indexed} indexed pages cannot be "
                    "evicted"
                )
            cached += indexed
        assert len(free) + cached == total, (
            f"group {group}: {len(free)} free and {cached} cached pages are not the {total} of "
            "the pool"
        )
