"""Follows page tables on the host, and keeps the groups of the decode rows that run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from attrs import evolve, frozen

from headstock.execution.shared_prefix import RowGroups, group_rows
from headstock.scheduler import Plan
from headstock.scheduler.row_counters import read_only
from headstock.spi import MAX_PREFIX_GROUPS, KVGroup, PrefixGroups
from headstock.spi.arrays import Ints

_STAY = 0.75
"""The part of what makes grouping worth it at which it ends again.

Between the two, a step goes on as the one before: rows that come and go would else make tokens
flip between two ways of adding.
"""


@frozen(eq=False)
class GroupedRows:
    """The groups of a plan's rows that decode.

    order: [rows] int64, where each of them, group by group, is among the plan's rows
    place: [rows] int64, its inverse: where each of them went
    is_sorted: they are in that order already
    """

    groups: PrefixGroups
    order: Ints
    place: Ints
    is_sorted: bool


class PrefixTracker:
    """The page tables of the device as plans have left them, and the last plan's groups.

    The tables decide which rows are a group: rows with the same leading pages read the same keys
    and values, however they came to share them.
    """

    def __init__(
        self, groups: Sequence[KVGroup], *, rows: int, columns: int, page_size: int, min_tokens: int
    ) -> None:
        """Begin with tables without pages.

        min_tokens: how many tokens groups must spare a step
        """
        # The groups of layers that read all tokens; pages behind a window are dropped.
        self.tables = {
            index: np.zeros((rows, columns), np.int32)
            for index, group in enumerate(groups)
            if group.retains_all
        }
        self.page_size = page_size
        self.min_tokens = min_tokens
        self.rows: Ints = np.zeros(0, np.int32)
        # How many leading pages of each row could be shared when the groups were made. Pages that
        # come later lie behind these.
        self.num_pages = np.zeros(rows, np.int64)
        self.is_stale = True
        self.current: GroupedRows | None = None

    def apply_plan(self, plan: Plan, new_rows: Iterable[int]) -> None:
        """Bring the tables up to date with a plan, as `Buffers.apply_plan` does the device's."""
        for row in new_rows:
            self.is_stale |= bool((self.rows == row).any())
            for table in self.tables.values():
                table[row] = 0
        rows, columns, pages = plan.page_rows, plan.page_columns, plan.page_numbers
        if not len(rows):
            return
        if (columns < self.num_pages[rows]).any():
            self.is_stale = True
        for group, table in self.tables.items():
            mine = plan.page_groups == group
            table[rows[mine], columns[mine]] = pages[mine]

    def group_plan(self, plan: Plan) -> GroupedRows | None:
        """Return the groups of the rows that decode; None where reading once does not pay.

        The plan has been applied. Nothing is computed while the same rows go on, and a plan of
        prompts alone changes nothing.
        """
        if not plan.num_decode:
            return None
        rows = plan.rows[: plan.num_decode]
        is_same = np.array_equal(rows, self.rows)
        if not is_same and not np.isin(rows, self.rows).any():
            # Other requests: the previous ones' groups do not apply to these.
            self.current, self.is_stale = None, True
        if self.is_stale or not is_same:
            # Pages that are full before this step, so that none holds the row's newest token.
            num_pages = (plan.starts[: plan.num_decode] // self.page_size).astype(np.int64)
            self.current = self._find_groups(rows, num_pages)
            self.rows, self.is_stale = rows, False
            self.num_pages[:] = 0
            self.num_pages[rows] = num_pages
        return self.current

    def _find_groups(self, rows: Ints, num_pages: Ints) -> GroupedRows | None:
        """Find the groups of these rows, given how many leading pages each may share."""
        if len(rows) < 2 or not self.tables:
            return None
        columns = int(num_pages.max())
        tables = [table[rows, :columns] for table in self.tables.values()]
        groups = group_rows(tables, num_pages, MAX_PREFIX_GROUPS) if columns else None
        least = self.min_tokens * (1.0 if self.current is None else _STAY)
        if groups is None or groups.num_saved_pages * self.page_size < least:
            return None
        return _to_grouped(groups, self.page_size)


def _to_grouped(groups: RowGroups, page_size: int) -> GroupedRows:
    """Convert groups in pages to groups in tokens, with the way back to the plan's order."""
    place = np.empty_like(groups.order)
    place[groups.order] = np.arange(len(place))
    return GroupedRows(
        groups=PrefixGroups(
            counts=read_only(groups.counts.astype(np.int32)),
            lens=read_only((groups.num_pages * page_size).astype(np.int32)),
        ),
        order=groups.order,
        place=place,
        is_sorted=bool((groups.order == np.arange(len(place))).all()),
    )


def keep_prompts(order: Ints, count: int) -> Ints:
    """Return an order of the first rows of `count` as one of them all: the others stay.

    order: [rows] int64    returns: [count] int64
    """
    return np.concatenate((order, np.arange(len(order), count)))


def sort_rows(plan: Plan, order: Ints) -> Plan:
    """Return the plan with its rows in this order.

    order: [rows] int64
    """
    return evolve(
        plan,
        rows=plan.rows[order],
        admission_ids=plan.admission_ids[order],
        starts=plan.starts[order],
        stops=plan.stops[order],
        num_logits=plan.num_logits[order],
        samples=plan.samples[order],
    )
