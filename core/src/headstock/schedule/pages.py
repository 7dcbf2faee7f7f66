"""Who has which page. The only module that moves pages between the free list, the rows and the prefix index.

A page is *free*, *held* (`refs` counts the rows that hold it) or *cached* (the index knows it and no row holds it).
Only the index makes rows share pages, so a held page that the index does not know belongs to one row.
"""

from __future__ import annotations

import numpy as np

from headstock.errors import PluginBroken
from headstock.schedule.regions import Region
from headstock.schedule.state import NO_PAGES, Column, Draft, some, writeable
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


def take(draft: Draft, group: int, count: int) -> Ints:
    """`count` pages off the free list; the caller has made sure that they are available.   returns: [count] int32"""
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
    """Put pages on the free list, a stack of arrays: joining them to one would copy the whole list each time."""
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
            f"the cache plugin {type(policy).__name__} promised {count} evictable pages and gave {len(pages)}; "
            "report it there"
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


def keep_region(draft: Draft, row: int) -> None:
    """Take the row's region from it and keep it, when regions are kept, for a request that goes on from there."""
    if not draft.limits.most_regions:
        return
    count = int(shareable(draft)[row])
    if not count:
        return
    entry = draft.seats[row]
    assert entry is not None, f"row {row} has a region but no request"
    held = [rows[row] for rows in draft.pages]
    for group, pages in enumerate(held):
        refs = draft.refs[group] = writeable(draft.refs[group])
        refs[pages] = 0
        draft.pages[group][row] = NO_PAGES
    tokens, numbers = draft.tokens[row, :count].copy(), tuple(int(pages[0]) for pages in held)
    draft.regions = (*draft.regions, Region(tokens=tokens, pages=numbers, namespace=entry.request.namespace))
    if len(draft.regions) > draft.limits.most_regions:
        drop_region(draft)


def take_over(draft: Draft, row: int, region: Region) -> None:
    """Let the row go on in a kept region, which is its own from now on."""
    draft.regions = tuple([other for other in draft.regions if other is not region])
    for group, page in enumerate(region.pages):
        pages = np.array([page], np.int32)
        refs = draft.refs[group] = writeable(draft.refs[group])
        refs[page] = 1
        draft.pages[group][row] = pages
        draft.spans[group, row] = 1
        write(draft, group, row, 0, pages)


def check_unheld(draft: Draft, policy: CachePolicy, pages: Ints) -> None:
    """Raise PluginBroken when a row holds one of the pages that the index gave up."""
    if draft.refs[0][pages].any():
        raise PluginBroken(
            f"the cache plugin {type(policy).__name__} evicted a page that a running row holds; report it there"
        )


def grow(draft: Draft, group: int, rows: Ints, counts: Ints) -> None:
    """Give each of the rows so many more pages of `group`; the caller has made sure that they are available.

    rows, counts: [n], counts at least 1
    """
    ends = counts.cumsum()
    fresh = take(draft, group, int(ends[-1]))
    refs = draft.refs[group] = writeable(draft.refs[group])
    refs[fresh] = 1
    pages, start = draft.pages[group], 0
    for row, stop in zip(rows.tolist(), ends.tolist(), strict=True):
        held = pages[row]
        pages[row] = np.concatenate((held, fresh[start:stop])) if len(held) else fresh[start:stop]
        start = stop
    spans = draft.spans[group]
    columns = spans.take(rows)
    spans[rows] = columns + counts
    if start > len(rows):  # some row got several
        rows, columns = np.repeat(rows, counts), np.repeat(columns - ends + counts, counts) + np.arange(start)
    draft.writes.append((group, rows, columns, fresh))


def write(draft: Draft, group: int, row: int, column: int, pages: Ints) -> None:
    """Note that the row's page table holds `pages` from `column` on."""
    count = len(pages)
    draft.writes.append((group, np.full(count, row), np.arange(column, column + count), pages))


def share(draft: Draft, row: int, match: Match) -> None:
    """Let the row start on matched pages."""
    if draft.limits.policy is not None and match.handle is not None:
        draft.limits.policy.hold(draft.index, match.handle)
    refs = draft.refs[0] = writeable(draft.refs[0])
    refs[match.pages] += np.uint16(1)
    draft.pages[0][row] = match.pages
    draft.handles[row] = match.handle
    draft.columns[Column.INDEXED, row] = len(match.pages)
    draft.spans[0, row] = len(match.pages)
    if len(match.pages):
        write(draft, 0, row, 0, match.pages)


def release(draft: Draft, row: int) -> None:
    """Take all pages from the row: those the index knows stay cached there, the others become free."""
    indexed = int(draft.columns[Column.INDEXED, row])
    for group, rows in enumerate(draft.pages):
        pages = rows[row]
        refs = draft.refs[group] = writeable(draft.refs[group])
        refs[pages] -= np.uint16(1)
        private = pages[indexed:] if group == 0 else pages
        give_back(draft, group, private)
        rows[row] = NO_PAGES
    if draft.handles[row] is not None and draft.limits.policy is not None:
        draft.limits.policy.release(draft.index, draft.handles[row])
    draft.handles[row] = None
    draft.spans[:, row] = 0
    if draft.first_pages[:, row].any():
        draft.first_pages = writeable(draft.first_pages)
        draft.first_pages[:, row] = 0


def shareable(draft: Draft) -> Ints:
    """How many tokens of each row may be shared or kept: known ones, computed by steps known to be done.

    Under overlap the plan made last still runs, and may fail.   returns: [rows] int32
    """
    columns = draft.columns
    done: Ints = np.minimum(columns[Column.NUM_COMPUTED], columns[Column.NUM_KNOWN])
    return np.minimum(done, columns[Column.BEFORE]) if draft.limits.overlap else done


def forget(draft: Draft, rows: Ints) -> None:
    """Take all pages from the rows, none of which is indexed: every token of theirs is to be computed again."""
    for row in rows.tolist():
        for group, span in enumerate(draft.spans[:, row].tolist()):
            write(draft, group, row, 0, np.zeros(span, np.int32))
        release(draft, row)
    draft.columns[Column.NUM_COMPUTED, rows] = 0


def index_full(draft: Draft) -> None:
    """Insert into the prefix index every page that has become full of known tokens, by steps known to be done."""
    policy = draft.limits.policy
    if policy is None:
        return
    size = draft.limits.page_size
    full = shareable(draft) // size
    indexed = draft.columns[Column.INDEXED]
    rows = np.flatnonzero(full > indexed)
    if not len(rows):
        return
    starts, stops = indexed.take(rows).tolist(), full.take(rows).tolist()
    indexed[rows] = stops
    held, seats, handles, insert = draft.pages[0], draft.seats, draft.handles, policy.insert
    for row, start, stop in zip(rows.tolist(), starts, stops, strict=True):
        own = held[row][start:stop]
        entry = seats[row]
        assert entry is not None, f"row {row} has pages but no request"
        tokens = draft.tokens[row, start * size : stop * size]
        inserted = insert(draft.index, handles[row], tokens, own, entry.request.namespace)
        handles[row] = inserted.handle
        if inserted.canonical is not own:
            change_over(draft, row, start, own, inserted.canonical)


def change_over(draft: Draft, row: int, start: int, own: Ints, canonical: Ints) -> None:
    """Move the row from its own pages to those that the index had for the same tokens already."""
    changed = canonical != own
    if not some(changed):
        return
    # The table is rewritten before the duplicates are freed: nothing points at a free page, at no time.
    pages = draft.pages[0][row].copy()
    pages[start : start + len(canonical)] = canonical
    draft.pages[0][row] = pages
    write(draft, 0, row, start, canonical)
    refs = draft.refs[0] = writeable(draft.refs[0])
    refs[canonical[changed]] += np.uint16(1)
    refs[own[changed]] -= np.uint16(1)
    give_back(draft, 0, own[changed])


def drop_behind(draft: Draft, group: int, rows: Ints) -> None:
    """Free pages that lie wholly behind the window of `group` for whatever the rows compute next."""
    window = draft.limits.groups[group].window
    assert window is not None, f"group {group} has no window"
    # The next query sees the latest `window` positions, itself included. It sits at `computed`, or where the known
    # tokens end when drafts in flight may yet be rejected.
    columns = draft.columns
    computed = np.minimum(columns[Column.NUM_COMPUTED, rows], columns[Column.NUM_KNOWN, rows])
    first = np.maximum(computed - window + 1, 0) // draft.limits.page_size
    for row, wanted in zip(rows.tolist(), first.tolist(), strict=True):
        dropped = wanted - int(draft.first_pages[group, row])
        if dropped <= 0:
            continue
        draft.first_pages, draft.refs[group] = writeable(draft.first_pages), writeable(draft.refs[group])
        gone, draft.pages[group][row] = draft.pages[group][row][:dropped], draft.pages[group][row][dropped:]
        draft.refs[group][gone] -= np.uint16(1)
        give_back(draft, group, gone)
        write(draft, group, row, wanted - dropped, np.zeros(dropped, np.int32))
        draft.first_pages[group, row] = wanted
