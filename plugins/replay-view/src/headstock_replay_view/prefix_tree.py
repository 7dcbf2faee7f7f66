"""The prefix tree, inferred from the pages of rows and the set of indexed pages.

A policy's index is private, so the tree is inferred from what every policy exposes.
"""

from __future__ import annotations

import numpy as np

from headstock.scheduler import Limits, RowCounter, State
from headstock.spi.arrays import Ints

NO_PAGES: Ints = np.zeros(0, np.int32)
MAX_SEGMENTS = 400
"""Maximum segments of a tree; those with the fewest tokens below them are only counted."""
GONE = -1


class PrefixTracker:
    """Tracks the predecessor of each page, which rows reveal when their pages are indexed.

    The pages are those of one KV group, which keeps all tokens.
    """

    def __init__(self, limits: Limits, group: int = 0) -> None:
        pages = limits.num_pages[group] + 1
        self.group = group
        self.page_size = limits.page_size
        self.parents = np.zeros(pages, np.int32)  # 0: begins a sequence
        self.depths = np.zeros(pages, np.int32)
        # number of the last step in which a row held the page
        self.last_used = np.zeros(pages, np.int64)
        # admission id and number of indexed pages of each row, after the last step
        self.rows_seen = np.zeros((2, limits.max_rows), np.int32)
        # the pages of each row, after the last step
        self.pages_by_row: tuple[Ints, ...] = (NO_PAGES,) * limits.max_rows

    def add_step(self, after: State, number: int) -> None:
        """Link the pages of rows whose indexed pages changed."""
        before, self.pages_by_row = self.pages_by_row, after.pages[self.group]
        self.last_used[after.refs[self.group] > 0] = number
        now = after.row_counters[[RowCounter.ADMISSION_ID, RowCounter.NUM_INDEXED]]
        changed = (now != self.rows_seen).any(0)
        has_left = changed & (now[0] != self.rows_seen[0]) & (self.rows_seen[0] > 0)
        # a row that ended may have had pages indexed in this step
        for row in np.flatnonzero(has_left).tolist():
            self._link_pages(before[row])
        for row in np.flatnonzero(changed & (now[1] > 0)).tolist():
            self._link_pages(self.pages_by_row[row][: now[1, row]])
        self.rows_seen = now

    def _link_pages(self, pages: Ints) -> None:
        """Link pages that follow each other from a sequence's start."""
        if len(pages):
            self.parents[pages[0]] = 0
            self.parents[pages[1:]] = pages[:-1]
            self.depths[pages] = np.arange(1, len(pages) + 1)

    def make_tree(self, indexed: Ints, refs: Ints) -> list[list[int]]:
        """Return the tree of the indexed pages as segments, parents first.

        A segment is a chain of pages that the same number of rows hold.

        returns: [parent segment or -1, tokens, rows that hold it, step of last use, count] of each
        segment; the last one is [GONE, tokens, 0, 0, count] for omitted segments
        """
        # by depth, so that every parent comes before its children
        pages = indexed[np.argsort(self.depths[indexed], kind="stable")]
        is_indexed = np.zeros(len(refs), bool)
        is_indexed[pages] = True
        parents = np.where(is_indexed[self.parents[pages]], self.parents[pages], 0)
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
    """Return the segments with equal leaves of a parent merged into one, with their count.

    Leaves are equal when they have as many tokens and as many rows. The last use is the latest.
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
    """Return the segments with the most tokens in and below them, and one for the others."""
    below = [segment[1] * segment[4] for segment in segments]
    # Backwards: children follow their parents, so each sum is complete before it is added.
    for at in range(len(segments) - 1, -1, -1):
        if segments[at][0] != GONE:
            below[segments[at][0]] += below[at]
    # A parent has more tokens than its child, so it is kept whenever the child is.
    indices = sorted(sorted(range(len(segments)), key=lambda at: -below[at])[:MAX_SEGMENTS])
    place = {at: new for new, at in enumerate(indices)} | {GONE: GONE}
    rest = [segment for at, segment in enumerate(segments) if at not in place]
    largest = [[place[segments[at][0]], *segments[at][1:]] for at in indices]
    return [
        *largest,
        [
            GONE,
            sum(segment[1] * segment[4] for segment in rest),
            0,
            0,
            sum(segment[4] for segment in rest),
        ],
    ]
