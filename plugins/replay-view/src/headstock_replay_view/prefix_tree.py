"""The prefix tree, as it can be seen from outside of any cache policy: by the pages of rows, and
which are indexed.
"""

from __future__ import annotations

import numpy as np

from headstock.scheduler import Limits, RowCounter, State
from headstock.spi.arrays import Ints

NO_PAGES: Ints = np.zeros(0, np.int32)
MAX_SEGMENTS = 400
"""Segments of a tree that are kept; those with fewest tokens below them are counted only."""
GONE = -1


class PrefixTracker:
    """Follows which page comes after which. A page's place is noted when a row shows it among its
    indexed pages.
    """

    def __init__(self, limits: Limits) -> None:
        pages = limits.num_pages[0] + 1
        self.page_size = limits.page_size
        self.parents = np.zeros(pages, np.int32)  # 0: begins a sequence
        self.depths = np.zeros(pages, np.int32)
        # number of the last step in which a row held the page
        self.last_used = np.zeros(pages, np.int64)
        # admission number and indexed pages noted, by row
        self.rows_seen = np.zeros((2, limits.max_rows), np.int32)
        # what the rows held after the last step
        self.pages_by_row: tuple[Ints, ...] = (NO_PAGES,) * limits.max_rows

    def add_step(self, after: State, number: int) -> None:
        """Note the pages of rows whose indexed pages changed."""
        before, self.pages_by_row = self.pages_by_row, after.pages[0]
        self.last_used[after.refs[0] > 0] = number
        now = after.row_counters[[RowCounter.ADMISSION_ID, RowCounter.NUM_INDEXED]]
        changed = (now != self.rows_seen).any(0)
        left = changed & (now[0] != self.rows_seen[0]) & (self.rows_seen[0] > 0)
        # it may have indexed pages just before it was preempted
        for row in np.flatnonzero(left).tolist():
            self._link_pages(before[row])
        for row in np.flatnonzero(changed & (now[1] > 0)).tolist():
            self._link_pages(self.pages_by_row[row][: now[1, row]])
        self.rows_seen = now

    def _link_pages(self, pages: Ints) -> None:
        """Note that these pages follow each other from a sequence's start."""
        if len(pages):
            self.parents[pages[0]] = 0
            self.parents[pages[1:]] = pages[:-1]
            self.depths[pages] = np.arange(1, len(pages) + 1)

    def make_tree(self, indexed: Ints, refs: Ints) -> list[list[int]]:
        """The tree of the indexed pages, pages in a chain with as many holders as one segment,
        parents first.

        returns: [parent segment or -1, tokens, rows that hold it, step of last use, how many such]
        of each; the last one is [GONE, tokens, 0, 0, segments] of what was left out
        """
        pages = indexed[np.argsort(self.depths[indexed], kind="stable")]
        known = np.zeros(len(refs), bool)
        known[pages] = True
        parents = np.where(known[self.parents[pages]], self.parents[pages], 0)
        children = np.bincount(parents, minlength=len(refs))
        alone = (parents > 0) & (children[parents] == 1) & (refs[pages] == refs[parents])
        segment_of = np.full(len(refs), GONE)
        segments: list[list[int]] = []
        for page, parent, follows in zip(
            pages.tolist(), parents.tolist(), alone.tolist(), strict=True
        ):
            if follows:
                at = int(segment_of[parent])
                segments[at][1] += self.page_size
                segments[at][3] = max(segments[at][3], int(self.last_used[page]))
            else:
                at = len(segments)
                segments.append(
                    [
                        int(segment_of[parent]),
                        self.page_size,
                        int(refs[page]),
                        int(self.last_used[page]),
                        1,
                    ]
                )
            segment_of[page] = at
        return keep_largest_segments(fold_equal_leaves(segments))


def fold_equal_leaves(segments: list[list[int]]) -> list[list[int]]:
    """The segments with equal leaves of one parent (as many tokens, as many holders) counted as
    one, used last when the latest of them was.
    """
    inner = {segment[0] for segment in segments}
    places: dict[int, int] = {GONE: GONE}
    leaves: dict[tuple[int, int, int], list[int]] = {}
    folded: list[list[int]] = []
    for at, (parent, tokens, refs, used, count) in enumerate(segments):
        key = (parent, tokens, refs)
        if at not in inner and key in leaves:
            leaves[key][3] = max(leaves[key][3], used)
            leaves[key][4] += count
            continue
        places[at] = len(folded)
        folded.append([places[parent], tokens, refs, used, count])
        if at not in inner:
            leaves[key] = folded[-1]
    return folded


def keep_largest_segments(segments: list[list[int]]) -> list[list[int]]:
    """The segments with the most tokens in and below them, renumbered, and one for the rest."""
    below = [segment[1] * segment[4] for segment in segments]
    for at in range(len(segments) - 1, -1, -1):
        if segments[at][0] != GONE:
            below[segments[at][0]] += below[at]
    # A parent has more below it than its child, so it is kept whenever the child is.
    kept = sorted(sorted(range(len(segments)), key=lambda at: -below[at])[:MAX_SEGMENTS])
    place = {at: new for new, at in enumerate(kept)} | {GONE: GONE}
    rest = [segment for at, segment in enumerate(segments) if at not in place]
    chosen = [[place[segments[at][0]], *segments[at][1:]] for at in kept]
    return [
        *chosen,
        [GONE, sum(each[1] * each[4] for each in rest), 0, 0, sum(each[4] for each in rest)],
    ]
