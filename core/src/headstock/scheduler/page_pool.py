"""Who has which page. The only module that moves pages between the free list, the rows and the
prefix index.

A page is *free*, *held* (`refs` counts the rows that hold it) or *cached* (the index knows it and
no row holds it). Only the index makes rows share pages, so a held page that the index does not know
belongs to one row.
"""

from __future__ import annotations

import numpy as np

from headstock.errors import PluginBroken
from headstock.scheduler.contiguous import Region
from headstock.scheduler.limits import Limits
from headstock.scheduler.row_counters import RowCounter, any_set, indices, writeable_copy
from headstock.scheduler.state import State
from headstock.scheduler.working_state import WorkingState, count_shareable_tokens
from headstock.spi.arrays import Ints
from headstock.spi.cache import CachePolicy, Match

_MAX_PARTS = 256
"""Arrays that a free list may consist of before they are joined."""


def count_available_pages(state: WorkingState, group: int) -> int:
    """Pages of `group` that could be handed out now: free ones, evictable ones and kept regions."""
    count = state.num_free[group] + len(state.regions)
    if state.limits.policy is not None and group == 0:
        count += state.limits.policy.count_evictable(state.index)
    return count


def count_held_pages(state: State, limits: Limits) -> int:
    """Pages of the first group that rows hold: those that are neither free nor cached."""
    cached = len(state.regions) + (
        0 if limits.policy is None else limits.policy.count_evictable(state.index)
    )
    return limits.num_pages[0] - state.num_free[0] - cached


def _take_pages(state: WorkingState, group: int, count: int) -> Ints:
    """`count` pages off the free list; the caller has made sure that they are available.

    returns: [count] int32
    """
    while state.regions and count > state.num_free[group]:
        _drop_region(state)
    short = count - state.num_free[group]
    if short > 0:
        free_pages(state, group, _evict_pages(state, short))
    state.num_free[group] -= count
    stack, parts = state.free[group], []
    while count:
        top = stack.pop()
        if len(top) > count:
            stack.append(top[: len(top) - count])
            top = top[len(top) - count :]
        parts.append(top)
        count -= len(top)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def free_pages(state: WorkingState, group: int, pages: Ints) -> None:
    """Put pages on the free list, a stack of arrays: joining them to one would copy the whole list
    each time.
    """
    if not len(pages):
        return
    # The step in flight may still read these pages, and this plan may reuse them: the device runs
    # steps in launch order, so the next step's writes come after those reads.
    stack = state.free[group]
    stack.append(pages)
    state.num_free[group] += len(pages)
    if len(stack) > _MAX_PARTS:
        state.free[group] = [np.concatenate(stack)]


def _evict_pages(state: WorkingState, count: int) -> Ints:
    """`count` pages that the index gives up."""
    policy = state.limits.policy
    assert policy is not None, "evict without a cache policy"
    pages = policy.evict(state.index, count)
    _check_not_held(state, policy, pages)
    if len(pages) < count:
        raise PluginBroken(
            f"the cache plugin {type(policy).__name__} promised {count} evictable pages and gave "
            f"{len(pages)}; report it there"
        )
    return pages


def clear_index(state: WorkingState) -> None:
    """Free every page that only the index keeps, or a region."""
    while state.regions:
        _drop_region(state)
    policy = state.limits.policy
    if policy is None:
        return
    pages = policy.evict_all(state.index)
    _check_not_held(state, policy, pages)
    free_pages(state, 0, pages)


def _drop_region(state: WorkingState) -> None:
    """Free the oldest kept region."""
    oldest, *rest = state.regions
    state.regions = tuple(rest)
    for group, page in enumerate(oldest.pages):
        free_pages(state, group, np.array([page], np.int32))


def _check_not_held(state: WorkingState, policy: CachePolicy, pages: Ints) -> None:
    """Raise PluginBroken when a row holds one of the pages that the index gave up."""
    if state.refs[0][pages].any():
        raise PluginBroken(
            f"the cache plugin {type(policy).__name__} evicted a page that a running row holds; "
            "report it there"
        )


def append_pages(state: WorkingState, group: int, rows: Ints, counts: Ints, total: int) -> None:
    """Give each row as many new pages as it needs; the caller has made sure that they are
    available.

    rows: [n] int64    counts: [n] int32, at least 1, `total` together
    """
    pages = _take_pages(state, group, total)
    state.refs[group][pages] = 1
    spans = state.spans[group]
    columns = spans.take(rows)
    spans[rows] = columns + counts
    if total > len(rows):  # some row got several
        rows, columns = expand_intervals(rows, columns, counts)
    state.table[group][rows, columns] = pages
    state.writes.append((group, rows, columns, pages))


def append_row_pages(state: WorkingState, group: int, row: int, count: int) -> None:
    """As `grow`, for one row."""
    pages = _take_pages(state, group, count)
    state.refs[group][pages] = 1
    span = int(state.spans[group, row])
    state.spans[group, row] = span + count
    write_page_table(state, group, row, span, pages)


def expand_intervals(rows: Ints, starts: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Rows and columns of `counts` table entries of each row from `starts` on.

    each: [sum of counts]
    """
    firsts = counts.cumsum() - counts
    columns = np.repeat(starts - firsts, counts) + np.arange(int(counts.sum()), dtype=np.int32)
    return np.repeat(rows, counts), columns


def write_page_table(state: WorkingState, group: int, row: int, column: int, pages: Ints) -> None:
    """Let the row's page table hold `pages` from `column` on, where the device is told of it
    too.
    """
    count = len(pages)
    state.table[group, row, column : column + count] = pages
    state.writes.append(
        (group, np.full(count, row), np.arange(column, column + count, dtype=np.int32), pages)
    )


def copy_row_pages(state: WorkingState, group: int, row: int) -> Ints:
    """A copy of the row's live pages: the table itself is written over.   returns: [n] int32"""
    return state.table[group, row, state.first_pages[group, row] : state.spans[group, row]].copy()


def share_prefix(state: WorkingState, row: int, match: Match) -> None:
    """Let the row start on matched pages."""
    if state.limits.policy is not None and match.handle is not None:
        state.limits.policy.hold(state.index, match.handle)
    state.handles[row] = match.handle
    count = len(match.pages)
    if not count:
        return
    state.refs[0][match.pages] += np.uint16(1)
    state.row_counters[RowCounter.NUM_INDEXED, row] = count
    state.spans[0, row] = count
    write_page_table(state, 0, row, 0, match.pages)


def free_row_pages(state: WorkingState, row: int) -> None:
    """Take all pages from the row: those the index knows stay cached there, the others become
    free.
    """
    indexed = int(state.row_counters[RowCounter.NUM_INDEXED, row])
    for group, refs in enumerate(state.refs):
        pages = copy_row_pages(state, group, row)
        refs[pages] -= np.uint16(1)
        free_pages(state, group, pages[indexed:] if group == 0 else pages)
    if state.handles[row] is not None and state.limits.policy is not None:
        state.limits.policy.release(state.index, state.handles[row])
    state.handles[row] = None
    _clear_page_table(state, row)


def _clear_page_table(state: WorkingState, row: int) -> None:
    """The row's page table is empty."""
    state.spans[:, row] = 0
    if any_set(state.first_pages[:, row]):
        state.first_pages = writeable_copy(state.first_pages)
        state.first_pages[:, row] = 0


def recompute_rows(state: WorkingState, rows: Ints) -> None:
    """Take all pages from the rows, none of which is indexed: every token of theirs is to be
    computed again.
    """
    for row in rows.tolist():
        spans = state.spans[:, row].tolist()
        free_row_pages(state, row)
        for group, span in enumerate(spans):
            write_page_table(state, group, row, 0, np.zeros(span, np.int32))
    state.row_counters[RowCounter.NUM_COMPUTED, rows] = 0


def free_out_of_window(state: WorkingState, group: int, rows: Ints) -> None:
    """Free pages that lie wholly behind the window of `group` for whatever the rows compute
    next.
    """
    window = state.limits.groups[group].window
    assert window is not None, f"group {group} has no window"
    # The next query sees the latest `window` positions, itself included. It sits at `computed`, or
    # at the end of the known tokens: rejected drafts take the row back there, where it needs pages
    # that the drafts' own window no longer covers.
    counters = state.row_counters
    computed = np.minimum(
        counters[RowCounter.NUM_COMPUTED, rows], counters[RowCounter.NUM_KNOWN, rows]
    )
    first = np.maximum(computed - window + 1, 0) // state.limits.page_size
    ready = indices(first > state.first_pages[group, rows])
    for row, first_kept in zip(rows[ready].tolist(), first[ready].tolist(), strict=True):
        start = int(state.first_pages[group, row])
        freed = state.table[group, row, start:first_kept].copy()
        state.refs[group][freed] -= np.uint16(1)
        free_pages(state, group, freed)
        write_page_table(state, group, row, start, np.zeros(len(freed), np.int32))
        state.first_pages = writeable_copy(state.first_pages)
        state.first_pages[group, row] = first_kept


def retain_region(state: WorkingState, row: int) -> None:
    """Take the row's region from it and keep it, when regions are kept, for a request that goes on
    from there.
    """
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
    tokens = state.tokens[row, :count].copy()
    state.regions = (
        *state.regions,
        Region(tokens=tokens, pages=pages, namespace=request_state.request.namespace),
    )
    if len(state.regions) > state.limits.max_regions:
        _drop_region(state)


def reuse_region(state: WorkingState, row: int, region: Region) -> None:
    """Let the row go on in a kept region, which is its own from now on."""
    state.regions = tuple([other for other in state.regions if other is not region])
    for group, page in enumerate(region.pages):
        state.refs[group][page] = 1
        state.spans[group, row] = 1
        write_page_table(state, group, row, 0, np.array([page], np.int32))
