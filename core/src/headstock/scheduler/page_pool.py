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
from headstock.scheduler.row_counters import Column, some, where, writeable
from headstock.scheduler.state import State
from headstock.scheduler.working_state import Draft, shareable
from headstock.spi.cache import CachePolicy, Match

Ints = np.ndarray

MOST_PARTS = 256
"""Arrays that a free list may consist of before they are joined."""


def available(draft: Draft, group: int) -> int:
    """Pages of `group` that could be handed out now: free ones, evictable ones and kept regions."""
    count = draft.num_free[group] + len(draft.regions)
    if draft.limits.policy is not None and group == 0:
        count += draft.limits.policy.evictable(draft.index)
    return count


def num_held(state: State, limits: Limits) -> int:
    """Pages of the first group that rows hold: those that are neither free nor cached."""
    cached = len(state.regions) + (
        0 if limits.policy is None else limits.policy.evictable(state.index)
    )
    return limits.num_pages[0] - state.num_free[0] - cached


def take(draft: Draft, group: int, count: int) -> Ints:
    """`count` pages off the free list; the caller has made sure that they are available.

    returns: [count] int32
    """
    while draft.regions and count > draft.num_free[group]:
        drop_region(draft)
    short = count - draft.num_free[group]
    if short > 0:
        give_back(draft, group, evict(draft, short))
    draft.num_free[group] -= count
    stack, parts = draft.free[group], []
    while count:
        top = stack.pop()
        if len(top) > count:
            stack.append(top[: len(top) - count])
            top = top[len(top) - count :]
        parts.append(top)
        count -= len(top)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def give_back(draft: Draft, group: int, pages: Ints) -> None:
    """Put pages on the free list, a stack of arrays: joining them to one would copy the whole list
    each time.
    """
    if not len(pages):
        return
    stack = draft.free[group]
    stack.append(pages)
    draft.num_free[group] += len(pages)
    if len(stack) > MOST_PARTS:
        draft.free[group] = [np.concatenate(stack)]


def evict(draft: Draft, count: int) -> Ints:
    """`count` pages that the index gives up."""
    policy = draft.limits.policy
    assert policy is not None, "evict without a cache policy"
    pages = policy.evict(draft.index, count)
    check_unheld(draft, policy, pages)
    if len(pages) < count:
        raise PluginBroken(
            f"the cache plugin {type(policy).__name__} promised {count} evictable pages and gave "
            f"{len(pages)}; report it there"
        )
    return pages


def clear_index(draft: Draft) -> None:
    """Free every page that only the index keeps, or a region."""
    while draft.regions:
        drop_region(draft)
    policy = draft.limits.policy
    if policy is None:
        return
    pages = policy.reset(draft.index)
    check_unheld(draft, policy, pages)
    give_back(draft, 0, pages)


def drop_region(draft: Draft) -> None:
    """Free the oldest kept region."""
    oldest, *rest = draft.regions
    draft.regions = tuple(rest)
    for group, page in enumerate(oldest.pages):
        give_back(draft, group, np.array([page], np.int32))


def check_unheld(draft: Draft, policy: CachePolicy, pages: Ints) -> None:
    """Raise PluginBroken when a row holds one of the pages that the index gave up."""
    if draft.refs[0][pages].any():
        raise PluginBroken(
            f"the cache plugin {type(policy).__name__} evicted a page that a running row holds; "
            "report it there"
        )


def grow(draft: Draft, group: int, rows: Ints, counts: Ints, total: int) -> None:
    """Give each row as many new pages as it needs; the caller has made sure that they are
    available.

    rows: [n] int64    counts: [n] int32, at least 1, `total` together
    """
    fresh = take(draft, group, total)
    draft.refs[group][fresh] = 1
    spans = draft.spans[group]
    columns = spans.take(rows)
    spans[rows] = columns + counts
    if total > len(rows):  # some row got several
        rows, columns = spread(rows, columns, counts)
    draft.table[group][rows, columns] = fresh
    draft.writes.append((group, rows, columns, fresh))


def grow_one(draft: Draft, group: int, row: int, count: int) -> None:
    """As `grow`, for one row."""
    fresh = take(draft, group, count)
    draft.refs[group][fresh] = 1
    span = int(draft.spans[group, row])
    draft.spans[group, row] = span + count
    write(draft, group, row, span, fresh)


def spread(rows: Ints, starts: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Rows and columns of `counts` table entries of each row from `starts` on.

    each: [sum of counts]
    """
    firsts = counts.cumsum() - counts
    columns = np.repeat(starts - firsts, counts) + np.arange(int(counts.sum()), dtype=np.int32)
    return np.repeat(rows, counts), columns


def write(draft: Draft, group: int, row: int, column: int, pages: Ints) -> None:
    """Let the row's page table hold `pages` from `column` on, where the device is told of it
    too.
    """
    count = len(pages)
    draft.table[group, row, column : column + count] = pages
    draft.writes.append(
        (group, np.full(count, row), np.arange(column, column + count, dtype=np.int32), pages)
    )


def held(draft: Draft, group: int, row: int) -> Ints:
    """A copy of the row's live pages: the table itself is written over.   returns: [n] int32"""
    return draft.table[group, row, draft.first_pages[group, row] : draft.spans[group, row]].copy()


def share(draft: Draft, row: int, match: Match) -> None:
    """Let the row start on matched pages."""
    if draft.limits.policy is not None and match.handle is not None:
        draft.limits.policy.hold(draft.index, match.handle)
    draft.handles[row] = match.handle
    count = len(match.pages)
    if not count:
        return
    draft.refs[0][match.pages] += np.uint16(1)
    draft.columns[Column.INDEXED, row] = count
    draft.spans[0, row] = count
    write(draft, 0, row, 0, match.pages)


def release(draft: Draft, row: int) -> None:
    """Take all pages from the row: those the index knows stay cached there, the others become
    free.
    """
    indexed = int(draft.columns[Column.INDEXED, row])
    for group, refs in enumerate(draft.refs):
        pages = held(draft, group, row)
        refs[pages] -= np.uint16(1)
        give_back(draft, group, pages[indexed:] if group == 0 else pages)
    if draft.handles[row] is not None and draft.limits.policy is not None:
        draft.limits.policy.release(draft.index, draft.handles[row])
    draft.handles[row] = None
    let_go(draft, row)


def let_go(draft: Draft, row: int) -> None:
    """The row's page table is empty."""
    draft.spans[:, row] = 0
    if some(draft.first_pages[:, row]):
        draft.first_pages = writeable(draft.first_pages)
        draft.first_pages[:, row] = 0


def forget(draft: Draft, rows: Ints) -> None:
    """Take all pages from the rows, none of which is indexed: every token of theirs is to be
    computed again.
    """
    for row in rows.tolist():
        spans = draft.spans[:, row].tolist()
        release(draft, row)
        for group, span in enumerate(spans):
            write(draft, group, row, 0, np.zeros(span, np.int32))
    draft.columns[Column.NUM_COMPUTED, rows] = 0


def drop_behind(draft: Draft, group: int, rows: Ints) -> None:
    """Free pages that lie wholly behind the window of `group` for whatever the rows compute
    next.
    """
    window = draft.limits.groups[group].window
    assert window is not None, f"group {group} has no window"
    # The next query sees the latest `window` positions, itself included. It sits at `computed`, or
    # where the known tokens end when drafts in flight may yet be rejected.
    columns = draft.columns
    computed = np.minimum(columns[Column.NUM_COMPUTED, rows], columns[Column.NUM_KNOWN, rows])
    first = np.maximum(computed - window + 1, 0) // draft.limits.page_size
    ready = where(first > draft.first_pages[group, rows])
    for row, wanted in zip(rows[ready].tolist(), first[ready].tolist(), strict=True):
        start = int(draft.first_pages[group, row])
        gone = draft.table[group, row, start:wanted].copy()
        draft.refs[group][gone] -= np.uint16(1)
        give_back(draft, group, gone)
        write(draft, group, row, start, np.zeros(len(gone), np.int32))
        draft.first_pages = writeable(draft.first_pages)
        draft.first_pages[group, row] = wanted


def keep_region(draft: Draft, row: int) -> None:
    """Take the row's region from it and keep it, when regions are kept, for a request that goes on
    from there.
    """
    if not draft.limits.most_regions:
        return
    count = int(shareable(draft)[row])
    if not count:
        return
    entry = draft.seats[row]
    assert entry is not None, f"row {row} has a region but no request"
    pages = tuple(draft.table[:, row, 0].tolist())
    for refs, page in zip(draft.refs, pages, strict=True):
        refs[page] = 0
    let_go(draft, row)
    tokens = draft.tokens[row, :count].copy()
    draft.regions = (
        *draft.regions,
        Region(tokens=tokens, pages=pages, namespace=entry.request.namespace),
    )
    if len(draft.regions) > draft.limits.most_regions:
        drop_region(draft)


def take_over(draft: Draft, row: int, region: Region) -> None:
    """Let the row go on in a kept region, which is its own from now on."""
    draft.regions = tuple([other for other in draft.regions if other is not region])
    for group, page in enumerate(region.pages):
        draft.refs[group][page] = 1
        draft.spans[group, row] = 1
        write(draft, group, row, 0, np.array([page], np.int32))
