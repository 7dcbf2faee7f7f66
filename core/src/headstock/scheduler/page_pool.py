"""The owners of pages; only this module moves pages between free list, rows and prefix index.

A page is *free*, *held* (`refs` counts the rows that hold it) or *cached* (the index has it and no
row holds it). Only the index makes rows share pages, so a held page that is not in the index
belongs to one row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headstock.errors import describe_type
from headstock.scheduler.contiguous import Region
from headstock.scheduler.limits import Limits
from headstock.scheduler.policy_answers import blame_policy, check_evicted
from headstock.scheduler.row_counters import (
    RowCounter,
    all_set,
    any_set,
    indices,
    read_only,
)
from headstock.scheduler.state import State, count_shareable_tokens
from headstock.spi.arrays import Ints
from headstock.spi.cache import CachePolicy, Match

_MAX_PARTS = 256
"""Arrays of a free list before they are joined to one."""


def count_available_pages(state: State, group: int) -> int:
    """Return how many pages of `group` are free, evictable, in retained regions or held back."""
    count = state.num_free[group] + len(state.regions)
    if state.limits.policy is not None:
        evictable = state.limits.policy.count_evictable(state.index, group)
        try:
            count += evictable
        except TypeError:
            blame_policy(
                state.limits,
                f"counted evictable pages: expected an integer, got {describe_type(evictable)}",
            )
    if group in state.held_back:
        rows = indices(state.row_counters[RowCounter.ACTIVE])
        ends = _first_pages_in_window(state, group, rows)
        count += int(np.maximum(ends - state.first_pages[group, rows], 0).sum())
    return count


def count_held_pages(state: State, limits: Limits) -> int:
    """Return how many pages of all groups together are neither free nor cached."""
    count = sum(limits.num_pages) - sum(state.num_free) - len(state.regions) * len(limits.groups)
    if limits.policy is not None:
        for group in range(len(limits.groups)):
            count -= limits.policy.count_evictable(state.index, group)
    return count


def _take_pages(state: State, group: int, count: int) -> Ints:
    """Take `count` pages off the free list; the caller has checked that they are available.

    returns: [count] int32
    """
    while state.regions and count > state.num_free[group]:
        _drop_region(state)
    short = count - state.num_free[group]
    if short > 0:
        _evict_pages(state, group, short)
    state.num_free[group] -= count
    stack, parts = state.free[group], []
    while count:
        # Slices, not copies: at the start one array is as long as the pool.
        top = stack.pop()
        if len(top) > count:
            stack.append(top[: len(top) - count])
            top = top[len(top) - count :]
        parts.append(top)
        count -= len(top)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def free_pages(state: State, group: int, pages: Ints) -> None:
    """Put pages on the free list."""
    if not len(pages):
        return
    for page in pages.tolist() if state.copies else ():
        state.copies.pop((group, page), None)
    # The step in flight may still read these pages, and this plan may reuse them: the device runs
    # steps in launch order, so the next step's writes come after those reads.
    stack = state.free[group]
    # A stack of arrays: joining them would copy the whole list each time.
    stack.append(pages)
    state.num_free[group] += len(pages)
    if len(stack) > _MAX_PARTS:
        state.free[group] = [np.concatenate(stack)]


def take_page(state: State, group: int) -> int:
    """Take one page, which is held once; the caller has checked that one is available."""
    page = int(_take_pages(state, group, 1)[0])
    state.refs[group][page] = 1
    return page


def free_page(state: State, group: int, page: int) -> None:
    """Free a page that is held once."""
    state.refs[group][page] = 0
    free_pages(state, group, np.array([page], np.int32))


def copy_page(state: State, group: int, source: int, target: int) -> None:
    """Let the next plan copy a page.   writes: copies"""
    # The source may itself be a copy that the same plan makes.
    state.copies[group, target] = state.copies.get((group, source), source)


def _evict_pages(state: State, group: int, count: int) -> None:
    """Free `count` pages of `group` that the prefix index keeps, or that wait to be indexed.

    raises: PluginBroken when the cache policy gives fewer, or one that a row holds
    """
    policy = state.limits.policy
    assert policy is not None, "evict without a cache policy"
    if group in state.held_back and count > policy.count_evictable(state.index, group):
        state.held_back.discard(group)
        before = state.num_free[group]
        rows = indices(state.row_counters[RowCounter.ACTIVE])
        _free_pages_before(state, group, rows, _first_pages_in_window(state, group, rows))
        count -= state.num_free[group] - before
        if count <= 0:
            return
    before, evictable = state.num_free[group], policy.count_evictable(state.index, group)
    assert evictable >= count, f"group {group}: expected {count} evictable pages, got {evictable}"
    _free_evicted(state, policy.evict(state.index, group, count))
    evicted = state.num_free[group] - before
    if evicted < count:
        blame_policy(
            state.limits, f"promised {evictable} evictable pages, and gave {evicted} of {count}"
        )


def clear_index(state: State) -> None:
    """Free every page that the index caches, and every retained region."""
    while state.regions:
        _drop_region(state)
    policy = state.limits.policy
    if policy is None:
        return
    _free_evicted(state, policy.evict_all(state.index))


def _free_evicted(state: State, pages: Sequence[Ints]) -> None:
    """Free what the index has dropped of each group.   raises: PluginBroken if a row holds it"""
    for group, numbers in enumerate(check_evicted(state, pages)):
        free_pages(state, group, numbers)


def _drop_region(state: State) -> None:
    """Free the oldest retained region."""
    oldest, *rest = state.regions
    state.regions = tuple(rest)
    for group, page in enumerate(oldest.pages):
        free_pages(state, group, np.array([page], np.int32))


def append_pages(state: State, group: int, rows: Ints, counts: Ints, total: int) -> None:
    """Append `counts` new pages to each of the rows; the caller has checked that they exist.

    rows: [n] int64    counts: [n] int32, at least 1, `total` together
    """
    pages = _take_pages(state, group, total)
    state.refs[group][pages] = 1
    spans = state.spans[group]
    columns = spans.take(rows)
    spans[rows] = columns + counts
    if total > len(rows):  # some row got several
        # The scatter below needs one entry a page; with one page a row, `rows` is that already.
        rows, columns = expand_intervals(rows, columns, counts)
    state.table[group][rows, columns] = pages
    state.writes.append((group, rows, columns, pages))


def append_row_pages(state: State, group: int, row: int, count: int) -> None:
    """As `append_pages`, for one row."""
    pages = _take_pages(state, group, count)
    state.refs[group][pages] = 1
    span = int(state.spans[group, row])
    state.spans[group, row] = span + count
    write_page_table(state, group, row, span, pages)


def expand_intervals(rows: Ints, starts: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Return rows and columns of `counts` table entries of each row from `starts` on.

    Each result is [sum of counts].
    """
    firsts = counts.cumsum() - counts
    columns = np.repeat(starts - firsts, counts) + np.arange(int(counts.sum()), dtype=np.int32)
    return np.repeat(rows, counts), columns


def write_page_table(state: State, group: int, row: int, column: int, pages: Ints) -> None:
    """Write `pages` to the row's page table from `column` on; the next plan tells the device."""
    count = len(pages)
    state.table[group, row, column : column + count] = pages
    state.writes.append(
        (group, np.full(count, row), np.arange(column, column + count, dtype=np.int32), pages)
    )


def copy_row_pages(state: State, group: int, row: int) -> Ints:
    """Return a copy of the row's live pages, [n] int32."""
    # Copied: the table is written in place, and freed pages outlive the row's entries.
    return state.table[group, row, state.first_pages[group, row] : state.spans[group, row]].copy()


def share_prefix(state: State, row: int, match: Match) -> None:
    """Let the row start on the pages of a prefix match.

    raises: PluginBroken when the match lacks a page that the row reads
    """
    policy = state.limits.policy
    # Held first: what is held cannot be evicted when the row's other pages are taken.
    if policy is not None and match.handle is not None:
        policy.hold(state.index, match.handle)
    state.handles[row] = match.handle
    count = match.pages.shape[1]
    if not count or policy is None:
        return
    state.row_counters[RowCounter.NUM_INDEXED, row] = count
    state.spans[:, row] = count
    for group, pages in enumerate(match.pages):
        if group in state.limits.state_groups:
            state.spans[group, row] = 0  # the row gets a page of its own, and copies the snapshot
            continue
        if state.limits.groups[group].window is not None:
            _share_window(state, policy, group, row, pages)
        else:
            # A repeated index would count once; the pages of one prefix are distinct.
            state.refs[group][pages] += np.uint16(1)
        write_page_table(state, group, row, 0, pages)


def _share_window(state: State, policy: CachePolicy, group: int, row: int, pages: Ints) -> None:
    """Let the row hold what a match has of a window group.

    pages: [n] int32, 0 behind the window    raises: PluginBroken
    """
    size, kept = state.limits.page_size, pages > 0
    first = state.limits.groups[group].first_kept_page(len(pages) * size, size)
    if any_set(kept[:first]) or not all_set(kept[first:]):
        blame_policy(
            state.limits,
            f"matched {len(pages)} pages: in KV group {group}, which has a window: expected all "
            f"columns from {first} on, got {indices(kept).tolist()}",
        )
    refs, live = state.refs[group], pages[first:]
    policy.hold_pages(state.index, group, read_only(live[refs[live] == 0]))
    refs[live] += np.uint16(1)
    if first:
        state.first_pages[group, row] = first


def free_row_pages(state: State, row: int) -> None:
    """Take all pages from the row; those in the index stay cached, the others become free."""
    indexed = int(state.row_counters[RowCounter.NUM_INDEXED, row])
    for group, refs in enumerate(state.refs):
        pages = copy_row_pages(state, group, row)
        refs[pages] -= np.uint16(1)
        # Before the hold is released: the prefix goes only when no row holds a page of it.
        num_indexed = _release_indexed(state, group, row, pages) if indexed else 0
        free_pages(state, group, pages[num_indexed:])
    if state.handles[row] is not None and state.limits.policy is not None:
        state.limits.policy.release(state.index, state.handles[row])
    state.handles[row] = None
    _clear_page_table(state, row)


def _release_indexed(state: State, group: int, row: int, pages: Ints) -> int:
    """Let the index keep its pages among those that the row freed; return how many.

    pages: [n] int32, the row's first ones in the order of their tokens
    """
    num_indexed = int(state.row_counters[RowCounter.NUM_INDEXED, row])
    if group in state.limits.state_groups:
        return 0
    if state.limits.groups[group].window is None:
        return num_indexed
    num_indexed = max(num_indexed - int(state.first_pages[group, row]), 0)
    _release_pages(state, group, pages[:num_indexed])
    return num_indexed


def _release_pages(state: State, group: int, pages: Ints) -> None:
    """Tell the index which of its pages of a window group no row holds any more.

    pages: [n] int32, those that rows freed
    """
    unheld = pages[state.refs[group][pages] == 0].tolist()
    if unheld and state.limits.policy is not None:
        distinct = read_only(np.array(list(dict.fromkeys(unheld)), np.int32))
        state.limits.policy.release_pages(state.index, group, distinct)


def _clear_page_table(state: State, row: int) -> None:
    """Mark the row's page table as empty."""
    state.spans[:, row] = 0
    if any_set(state.first_pages[:, row]):
        state.first_pages[:, row] = 0


def recompute_rows(state: State, rows: Ints) -> None:
    """Take all pages from the rows, so that every token of theirs is computed again.

    None of the pages is indexed.
    """
    for row in rows.tolist():
        spans = state.spans[:, row].tolist()
        free_row_pages(state, row)
        for group, span in enumerate(spans):
            # Page 0 is the dummy page: the freed ones may have another owner when the step runs.
            write_page_table(state, group, row, 0, np.zeros(span, np.int32))
    state.row_counters[RowCounter.NUM_COMPUTED, rows] = 0


def free_out_of_window(state: State, group: int, rows: Ints) -> None:
    """Free pages that lie wholly behind the window of `group` for the rows' next tokens.

    Those that the index is to have are held back until it has them, or until pages are short.
    """
    ends = _first_pages_in_window(state, group, rows)
    if state.limits.policy is not None:
        # Under overlap a chunk may be longer than the window. Its pages are indexed a step later
        # than they leave the window.
        indexed = state.row_counters[RowCounter.NUM_INDEXED, rows]
        if any_set(ends > indexed):
            state.held_back.add(group)
            ends = np.minimum(ends, indexed)
    _free_pages_before(state, group, rows, ends)


def _first_pages_in_window(state: State, group: int, rows: Ints) -> Ints:
    """Return the first page that each row still reads of a window group, [n]."""
    window = state.limits.groups[group].window
    assert window is not None, f"group {group} has no window"
    # The next query sees the latest `window` positions, itself included. It sits at `computed`, or
    # at the end of the known tokens: rejected drafts take the row back there, where it needs pages
    # that the drafts' own window no longer covers.
    counters = state.row_counters
    computed = np.minimum(
        counters[RowCounter.NUM_COMPUTED, rows], counters[RowCounter.NUM_KNOWN, rows]
    )
    first: Ints = np.maximum(computed - window + 1, 0) // state.limits.page_size
    return first


def _free_pages_before(state: State, group: int, rows: Ints, ends: Ints) -> None:
    """Take each row's pages before column `ends` from it; indexed ones stay cached.

    rows, ends: [n]
    """
    starts = state.first_pages[group, rows]
    ready = indices(ends > starts)
    if not len(ready):
        return
    # All rows at once: one by one they took 12 us each.
    starts, ends, rows = starts[ready], ends[ready], rows[ready]
    state.first_pages[group, rows] = ends
    rows, columns = expand_intervals(rows, starts, ends - starts)
    pages = state.table[group][rows, columns]
    # Rows that share a page may let it go in one step, and it counts for each.
    np.subtract.at(state.refs[group], pages, np.uint16(1))
    is_indexed = columns < state.row_counters[RowCounter.NUM_INDEXED].take(rows)
    _release_pages(state, group, pages[is_indexed])
    free_pages(state, group, pages[~is_indexed])
    dummies = np.zeros(len(pages), np.int32)
    state.table[group][rows, columns] = dummies
    state.writes.append((group, rows, columns.astype(np.int32), dummies))


def retain_region(state: State, row: int) -> None:
    """Take the row's region from it for a later request, when regions are retained."""
    if not state.limits.max_regions:
        return
    count = int(count_shareable_tokens(state)[row])
    if not count:
        return
    request_state = state.requests_by_row[row]
    assert request_state is not None, f"row {row} has a region but no request"
    pages = tuple(state.table[:, row, 0].tolist())
    for refs, page in zip(state.refs, pages, strict=True):
        refs[page] = 0
    _clear_page_table(state, row)
    # Copied: the next request of the row overwrites the token table in place.
    tokens = state.tokens[row, :count].copy()
    state.regions = (
        *state.regions,
        Region(tokens=tokens, pages=pages, namespace=request_state.request.prefix_namespace),
    )
    if len(state.regions) > state.limits.max_regions:
        _drop_region(state)


def reuse_region(state: State, row: int, region: Region) -> None:
    """Let the row own a retained region and continue in it."""
    state.regions = tuple([other for other in state.regions if other is not region])
    for group, page in enumerate(region.pages):
        state.refs[group][page] = 1
        state.spans[group, row] = 1
        write_page_table(state, group, row, 0, np.array([page], np.int32))
