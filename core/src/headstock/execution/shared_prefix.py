"""Which decode rows share leading pages, so that attention reads these once for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from headstock.scheduler.row_counters import NONE, any_set, indices
from headstock.spi.arrays import Ints

_MAX_LEVELS = 4
"""How often a group is cut into groups that share more; each level costs some 20 us."""


@frozen(eq=False)
class RowGroups:
    """Rows of a batch in groups that share leading pages.

    order: [rows] int64, the rows' places in the batch, group by group, then those of no group
    counts: [groups] int64, the rows of each group, at least 2
    num_pages: [groups] int64, the leading pages that they share, at least 1
    """

    order: Ints
    counts: Ints
    num_pages: Ints

    @property
    def num_saved_pages(self) -> int:
        """How many reads of a page the groups save."""
        return int(((self.counts - 1) * self.num_pages).sum())


@frozen(eq=False)
class _Level:
    """The groups of one depth: finer than those of the level before.

    members: [n] int64, the rows that are in some group, group by group
    starts: [groups] int64, where each group begins in `members`
    counts, num_pages: [groups] int64
    parents: [groups] int64, the group of the level before that each one is cut from
    """

    members: Ints
    starts: Ints
    counts: Ints
    num_pages: Ints
    parents: Ints


def group_rows(tables: Sequence[Ints], max_pages: Ints, max_groups: int) -> RowGroups | None:
    """Return the disjoint groups that save the most reads of pages; None when no rows share any.

    Each group shares one run of leading pages. Rows that share more among fewer of them are a group
    of their own when that saves more.

    tables: by KV group, [rows, columns] page numbers; rows share a page if all tables agree on it
    max_pages: [rows] int64, how many leading pages of a row may be shared
    """
    levels = _find_levels(tables, max_pages)
    chosen = _choose_groups(levels) if levels else []
    sizes = [
        (-int((level.counts[group] - 1) * level.num_pages[group]), depth, group)
        for depth, level in enumerate(levels)
        for group in chosen[depth].nonzero()[0].tolist()
    ]
    best = sorted(sizes)[:max_groups]
    if not best:
        return None
    members = [
        levels[depth].members[start : start + levels[depth].counts[group]]
        for _, depth, group in best
        for start in [levels[depth].starts[group]]
    ]
    is_alone = np.ones(len(max_pages), bool)
    for rows in members:
        is_alone[rows] = False
    return RowGroups(
        order=np.concatenate([*members, is_alone.nonzero()[0]]),
        counts=np.array([len(rows) for rows in members]),
        num_pages=np.array([levels[depth].num_pages[group] for _, depth, group in best]),
    )


def _find_levels(tables: Sequence[Ints], max_pages: Ints) -> list[_Level]:
    """Cut the rows into groups by their first page, and each group by the first page it differs in.

    A level's groups have at least two rows; the other rows of their parents are in none.
    """
    levels: list[_Level] = []
    rows = indices(max_pages > 0)
    parent_of, keys = np.zeros(len(rows), np.int64), tables[0][rows, 0]
    while len(levels) < _MAX_LEVELS and len(rows) > 1:
        rows, parent_of, counts = _gather_equal(rows, parent_of, keys)
        if not len(counts):
            break
        starts = counts.cumsum() - counts
        num_pages = _count_shared(tables, max_pages, rows, starts, counts)
        levels.append(_Level(rows, starts, counts, num_pages, parent_of[starts]))
        # The next level: rows that go on after what their group shares, by the page that follows.
        parent_of = np.arange(len(starts)).repeat(counts)
        depth = num_pages[parent_of]
        goes_on = indices(max_pages[rows] > depth)
        rows, parent_of, depth = rows[goes_on], parent_of[goes_on], depth[goes_on]
        keys = tables[0][rows, depth]
    return levels


def _gather_equal(rows: Ints, parent_of: Ints, keys: Ints) -> tuple[Ints, Ints, Ints]:
    """Gather rows that have the parent and the page number in common with another row.

    rows, parent_of: [n] int64    keys: [n] int32 page numbers, 0 for none
    returns: rows and their parents, group by group; how many rows each group has
    """
    # Stable: the rows of a group stay in the order of the batch.
    both = (parent_of << 32) + keys
    order = both.argsort(kind="stable")
    both = both[order]
    is_same = both[1:] == both[:-1]
    # The dummy page has no owner: groups with a window drop a row's pages by pointing there.
    is_same &= keys[order[1:]] > 0
    if not any_set(is_same):
        return NONE, NONE, NONE
    is_member = np.zeros(len(rows), bool)
    is_member[1:] = is_same
    is_member[:-1] |= is_same
    members = order[is_member]
    is_first = np.ones(len(rows) + 1, bool)
    is_first[1:-1] = ~is_same
    edges = indices(is_first[:-1][is_member])
    counts = np.empty_like(edges)
    counts[:-1] = edges[1:] - edges[:-1]
    counts[-1:] = len(members) - edges[-1:]
    return rows[members], parent_of[members], counts


def _count_shared(
    tables: Sequence[Ints], max_pages: Ints, rows: Ints, starts: Ints, counts: Ints
) -> Ints:
    """Count the leading pages that all rows of each group share.

    rows: [n] the groups' rows, group by group
    returns: [groups] int64
    """
    shared = np.minimum.reduceat(max_pages[rows], starts)
    columns = int(shared.max())
    firsts = starts.repeat(counts)
    # One column more, which never agrees, so that `argmin` finds an end in each row.
    agrees = np.zeros((len(rows), columns + 1), bool)
    for table in tables:
        leading = table[rows, :columns]
        np.equal(leading, leading.take(firsts, 0), out=agrees[:, :columns])
        shared = np.minimum(shared, np.minimum.reduceat(agrees.argmin(1), starts))
    return shared


def _choose_groups(levels: list[_Level]) -> list[np.ndarray]:
    """Choose the disjoint groups that save the most: each group itself, or the best within it.

    returns: by level, [groups] bool
    """
    if len(levels) == 1:
        return [levels[0].num_pages > 0]
    keeps: list[np.ndarray] = []
    best = np.zeros(0, np.int64)
    for depth in reversed(range(len(levels))):
        level = levels[depth]
        within = np.zeros(len(level.starts), np.int64)
        if depth + 1 < len(levels):
            np.add.at(within, levels[depth + 1].parents, best)
        saved = (level.counts - 1) * level.num_pages
        keeps.insert(0, saved >= within)
        best = np.maximum(saved, within)
    is_open = np.ones(1, bool)
    for depth, level in enumerate(levels):
        can_choose = is_open[level.parents] if depth else np.ones(len(level.starts), bool)
        is_open = can_choose & ~keeps[depth]
        keeps[depth] = can_choose & keeps[depth] & (level.num_pages > 0)
    return keeps
