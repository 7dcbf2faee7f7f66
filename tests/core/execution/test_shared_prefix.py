"""Which rows are grouped, over page tables that a brute force can judge."""

from __future__ import annotations

import timeit
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from headstock.execution.prefix_tracker import PrefixTracker, keep_prompts, sort_rows
from headstock.execution.shared_prefix import RowGroups, group_rows
from headstock.scheduler import Plan
from headstock.spi import FullKV, KVGroup

LAYOUT = FullKV(kv_heads=1, k_dim=2, v_dim=2)
FULL = KVGroup(layers=(0,), layout=LAYOUT)
WINDOW = KVGroup(layers=(1,), layout=LAYOUT, window=7)


def most_saved(rows: list[list[int]], depth: int = 0) -> int:
    """The most reads of pages that disjoint groups of these rows spare; all agree up to `depth`."""
    while len(rows) > 1 and len({tuple(row[depth : depth + 1]) for row in rows}) == 1:
        if len(rows[0]) == depth or not rows[0][depth]:
            break
        depth += 1
    kept = sorted(row for row in rows if len(row) > depth and row[depth])
    parts = (list(part) for _, part in groupby(kept, lambda row: row[depth]))
    within = sum(most_saved(part, depth) for part in parts if 1 < len(part) < len(rows))
    return max((len(rows) - 1) * depth, within)


def check(found: RowGroups, tables: list[np.ndarray], max_pages: np.ndarray) -> None:
    """Each row is there once, and each group shares what it says, and no page more."""
    assert sorted(found.order.tolist()) == list(range(len(max_pages)))
    ends = np.cumsum(found.counts).tolist()
    for first, last, pages in zip([0, *ends], ends, found.num_pages.tolist(), strict=False):
        rows = found.order[first:last]
        assert last - first > 1 and pages > 0 and rows.tolist() == sorted(rows.tolist())
        assert (max_pages[rows] >= pages).all()
        for table in tables:
            assert (table[rows, :pages] == table[rows[0], :pages]).all()
        assert (tables[0][rows, :pages] > 0).all()
        more = [table[rows, pages : pages + 1] for table in tables]
        is_same = all((part == part[0]).all() and part.size for part in more)
        assert not is_same or (max_pages[rows] == pages).any() or not more[0].all()
    alone = found.order[ends[-1] :]
    assert alone.tolist() == sorted(alone.tolist())


@st.composite
def tables_of_rows(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Page numbers of a prefix tree: a page stands for all before it. [rows, 4], [rows]"""
    paths = draw(st.lists(st.lists(st.integers(0, 1), max_size=4), min_size=1, max_size=12))
    numbers: dict[tuple[int, ...], int] = {}
    table = np.zeros((len(paths), 4), np.int32)
    for row, path in enumerate(paths):
        for column in range(len(path)):
            table[row, column] = numbers.setdefault(tuple(path[: column + 1]), len(numbers) + 1)
    # Some rows' last pages hold their newest token.
    fewer = [draw(st.integers(0, len(path))) for path in paths]
    return table, np.array(fewer, np.int64)


@given(tables_of_rows())
def test_groups_spare_as_many_pages_as_any_could(drawn: tuple[np.ndarray, np.ndarray]) -> None:
    table, max_pages = drawn
    found = group_rows([table], max_pages, len(table))
    rows = [row[:count].tolist() for row, count in zip(table, max_pages, strict=True)]
    if found is None:
        assert most_saved(rows) == 0
        return
    check(found, [table], max_pages)
    assert found.num_saved_pages == most_saved(rows)


@given(tables_of_rows(), st.integers(1, 3), st.integers(0, 2**12 - 1))
def test_rows_share_what_all_kv_groups_share(
    drawn: tuple[np.ndarray, np.ndarray], most: int, kept: int
) -> None:
    table, max_pages = drawn
    # The second group lets some rows have a page of their own.
    other = table.copy()
    for row in range(len(table)):
        if not kept >> row & 1:
            other[row, row % 4] += 1000 * (row + 1)
    found = group_rows([table, other], max_pages, most)
    if found is not None:
        check(found, [table, other], max_pages)
        assert len(found.counts) <= most


def test_rows_that_share_more_are_a_group_when_that_spares_more() -> None:
    # All share one page, five of them four.
    table = np.array(
        [[1, 2, 3, 4, 10 + row] for row in range(5)] + [[1, 30, 31, 32, 33]] * 1, np.int32
    )
    found = group_rows([table], np.full(6, 4), 8)
    assert found is not None and (found.counts.tolist(), found.num_pages.tolist()) == ([5], [4])
    table[5, 1:] = [2, 3, 30, 31]
    found = group_rows([table], np.full(6, 4), 8)
    assert found is not None and (found.counts.tolist(), found.num_pages.tolist()) == ([5], [4])
    found = group_rows([table[3:]], np.full(3, 4), 8)
    assert found is not None and (found.counts.tolist(), found.num_pages.tolist()) == ([3], [3])


def test_the_largest_groups_go_first_and_no_more_than_there_is_room_for() -> None:
    table = np.repeat(np.arange(1, 21, dtype=np.int32), 2)[:, None].repeat(3, 1)
    table = np.concatenate([table, np.full((3, 3), 99, np.int32)])
    found = group_rows([table], np.full(len(table), 3), 8)
    assert found is not None and found.counts.tolist() == [3] + [2] * 7
    assert found.order[:3].tolist() == [40, 41, 42]


def plan(
    rows: list[int],
    starts: list[int],
    *,
    pages: list[tuple[int, int, int, int]] | None = None,
    num_decode: int | None = None,
    lens: list[int] | None = None,
) -> Plan:
    """A plan of these rows; pages: (KV group, row, column, page)."""
    written: Any = np.array(pages or np.zeros((0, 4)), np.int32).T
    count = np.ones(len(rows), np.int32)
    start = np.array(starts, np.int32)
    return Plan(
        number=1,
        num_decode=len(rows) if num_decode is None else num_decode,
        rows=np.array(rows, np.int32),
        admission_ids=np.array(rows, np.int32) + 100,
        starts=start,
        stops=start + (count if lens is None else np.array(lens, np.int32)),
        num_logits=count,
        samples=count,
        page_groups=written[0],
        page_rows=written[1],
        page_columns=written[2],
        page_numbers=written[3],
    )


def tracker(min_tokens: int = 1, groups: tuple[KVGroup, ...] = (FULL,)) -> PrefixTracker:
    """A tracker of 9 rows of at most 8 pages of 4 tokens."""
    return PrefixTracker(groups, rows=9, columns=8, page_size=4, min_tokens=min_tokens)


def admit(one: PrefixTracker, row: int, pages: list[int], group: int = 0) -> None:
    """Give the row these pages."""
    entries = [(group, row, column, page) for column, page in enumerate(pages)]
    one.apply_plan(plan([row], [0], pages=entries), [row])


def grouped(one: PrefixTracker, step: Plan) -> tuple[list[int], list[int], list[int]] | None:
    """The rows by group, how many each has, and the tokens that they share."""
    one.apply_plan(step, [])
    found = one.group_plan(step)
    if found is None:
        return None
    decoding = step.rows[: step.num_decode]
    assert (found.order[found.place] == np.arange(len(decoding))).all()
    rows = decoding[found.order]
    assert found.is_sorted == (rows.tolist() == decoding.tolist())
    return rows.tolist(), found.groups.counts.tolist(), found.groups.lens.tolist()


def test_decode_rows_with_the_same_pages_are_grouped() -> None:
    one = tracker()
    for row, pages in enumerate([[1, 2, 3], [7, 8], [1, 2, 4], [7, 9, 5]]):
        admit(one, row, pages)
    wanted = ([0, 2, 1, 3], [2, 2], [8, 4])
    assert grouped(one, plan([0, 1, 2, 3], [10, 7, 9, 10])) == wanted
    # The newest token of row 1 is in its first page.
    assert grouped(one, plan([1, 3], [3, 10])) is None
    assert grouped(one, plan([1, 3, 0], [4, 10, 11])) == ([1, 3, 0], [2], [4])


def test_steps_that_are_not_asked_about_leave_the_groups_of_others() -> None:
    one = tracker()
    for row in range(3):
        admit(one, row, [1, 2, 3 + row])
    first = plan([0, 1], [8, 9])
    one.apply_plan(first, [])
    groups = one.group_plan(first)
    assert groups is not None and groups.groups.lens.tolist() == [8]
    # A plan with prompts, whose runner reads each row by itself.
    one.apply_plan(plan([0, 1, 2], [9, 10, 8], num_decode=2, lens=[1, 1, 3]), [])
    last = plan([0, 1], [10, 11])
    one.apply_plan(last, [])
    assert one.group_plan(last) is groups
    # What such a plan writes counts all the same.
    mixed = plan([0, 1, 2], [11, 12, 11], pages=[(0, 1, 1, 77)], num_decode=2, lens=[1, 1, 3])
    one.apply_plan(mixed, [])
    assert grouped(one, plan([0, 1], [12, 13])) == ([0, 1], [2], [4])


def test_decode_rows_beside_prompts_are_grouped_and_prompts_are_not() -> None:
    one = tracker()
    for row, pages in enumerate([[1, 2, 3], [7, 8], [1, 2, 4], [1, 2, 5]]):
        admit(one, row, pages)
    mixed = plan([0, 1, 2, 3], [10, 7, 9, 8], num_decode=3, lens=[1, 1, 1, 4])
    assert grouped(one, mixed) == ([0, 2, 1], [2], [8])
    groups = one.group_plan(mixed)
    later = plan([0, 1, 2, 3], [11, 8, 10, 12], num_decode=3, lens=[1, 1, 1, 4])
    assert one.group_plan(later) is groups
    assert one.group_plan(plan([0, 1, 2], [12, 9, 11])) is groups
    assert grouped(one, plan([0, 1, 2, 3], [12, 9, 11, 16])) == ([0, 2, 3, 1], [3], [8])


def test_whole_graphs_with_prompts_begin_and_end_groups_as_steps_without_do() -> None:
    # Two rows spare 8 tokens, three 16.
    one = tracker(min_tokens=16)
    for row in range(4):
        admit(one, row, [1, 2, 3 + row] if row < 3 else [1, 9])
    two = plan([0, 1, 2], [8, 9, 8], num_decode=2, lens=[1, 1, 3])
    assert grouped(one, two) is None
    three = plan([0, 1, 2, 4], [9, 10, 11, 0], num_decode=3, lens=[1, 1, 1, 3])
    assert grouped(one, three) == ([0, 1, 2], [3], [8])
    # They spare 12 by the first page.
    four = plan([0, 1, 3, 4], [10, 11, 7, 3], num_decode=3, lens=[1, 1, 1, 3])
    assert grouped(one, four) is None
    four = plan([0, 1, 2, 3], [11, 12, 12, 8])
    assert grouped(one, four) == ([0, 1, 2, 3], [3], [8])


def test_steps_of_prompts_alone_and_new_rows_leave_the_groups_of_others() -> None:
    one = tracker(min_tokens=16)
    for row in range(4):
        admit(one, row, [1, 2, 3 + row] if row < 3 else [1, 9])
    rows = [0, 1, 2, 3]
    first = one.group_plan(plan(rows, [8, 9, 8, 7]))
    assert first is not None and first.groups.lens.tolist() == [8]
    admit(one, 4, [1, 2, 9])
    assert one.group_plan(plan([4], [4], num_decode=0, lens=[4])) is None
    assert one.group_plan(plan(rows, [9, 10, 9, 8])) is first
    # By the first page they spare 12, which is enough for groups that go on.
    changed = plan(rows, [10, 11, 10, 9], pages=[(0, 2, 1, 77)])
    assert grouped(one, changed) == (rows, [4], [4])
    admit(one, 0, [7, 8, 9])
    assert grouped(one, plan(rows, [8, 12, 11, 10])) is None


def test_a_new_request_in_a_row_without_full_pages_may_share_those_of_others() -> None:
    one = tracker()
    for row, pages in enumerate([[9], [1, 2, 3], [1, 2, 4]]):
        admit(one, row, pages)
    assert grouped(one, plan([0, 1, 2], [3, 9, 8])) == ([1, 2, 0], [2], [8])
    admit(one, 0, [1, 2, 5])
    assert grouped(one, plan([0, 1, 2], [8, 10, 9])) == ([0, 1, 2], [3], [8])


def test_groups_are_kept_until_rows_or_their_leading_pages_change() -> None:
    one = tracker()
    for row in range(3):
        admit(one, row, [1, 2, 3 + row])
    step = plan([0, 1, 2], [8, 8, 8])
    one.apply_plan(step, [])
    first = one.group_plan(step)
    for start in range(9, 20):
        new = [(0, row, start // 4, 20 + start * 3 + row) for row in range(3)] * (start % 4 == 0)
        step = plan([0, 1, 2], [start] * 3, pages=new)
        one.apply_plan(step, [])
        assert one.group_plan(step) is first
    # A page that another one replaced.
    assert grouped(one, plan([0, 1, 2], [20] * 3, pages=[(0, 1, 1, 77)])) == ([0, 1, 2], [3], [4])
    assert grouped(one, plan([0, 1], [21] * 2)) == ([0, 1], [2], [4])
    # The row has another request now.
    admit(one, 1, [50, 51])
    assert grouped(one, plan([0, 1], [21, 4])) is None
    # Preempted: its pages are gone.
    admit(one, 1, [1, 2, 3])
    assert grouped(one, plan([0, 1], [22, 9])) == ([0, 1], [2], [8])
    one.apply_plan(plan([0, 1], [22, 9], pages=[(0, 1, column, 0) for column in range(3)]), [])
    assert grouped(one, plan([0, 1], [23, 9])) is None


def test_groups_that_spare_too_little_are_none_and_end_later_than_they_begin() -> None:
    one = tracker(min_tokens=16)
    for row in range(6):
        admit(one, row, [1, 2, 3 + row] if row < 5 else [1, 60])
    assert grouped(one, plan([0, 1], [8, 8])) is None  # 8 tokens
    assert grouped(one, plan([0, 1, 2], [8, 8, 8])) == ([0, 1, 2], [3], [8])  # 16
    assert grouped(one, plan([0, 1, 2, 5], [9, 9, 9, 5])) == ([0, 1, 2, 5], [3], [8])
    # Rows 0, 1, 2 and 5 spare 12 by their first page, rows 0, 1 and 5 only 8.
    admit(one, 2, [1, 70, 71])
    admit(one, 1, [1, 80, 81])
    assert grouped(one, plan([0, 1, 2, 5], [9, 9, 9, 5])) == ([0, 1, 2, 5], [4], [4])
    assert grouped(one, plan([0, 1, 5], [10, 10, 6])) is None
    assert grouped(one, plan([0, 1, 2, 5], [11, 11, 11, 6])) is None


def test_groups_of_other_requests_must_spare_as_much_as_the_first() -> None:
    # Rows 0 to 2 spare 16 tokens, rows 3 to 6 by their first page 12.
    one = tracker(min_tokens=16)
    for row in range(3):
        admit(one, row, [1, 2, 3 + row])
    assert grouped(one, plan([0, 1, 2], [8, 8, 8])) == ([0, 1, 2], [3], [8])
    for row in range(3, 7):
        admit(one, row, [40, 50 + row, 60 + row])
    assert grouped(one, plan([3, 4, 5, 6], [8] * 4, num_decode=0, lens=[2] * 4)) is None
    assert grouped(one, plan([3, 4, 5, 6], [10] * 4)) is None


def test_pages_behind_a_window_decide_nothing() -> None:
    one = tracker(groups=(WINDOW, FULL))
    for row in range(2):
        admit(one, row, [1, 2, 3 + row], group=1)
        one.apply_plan(plan([row], [0], pages=[(0, row, 0, 40 + row)]), [])
    assert grouped(one, plan([0, 1], [9, 9])) == ([0, 1], [2], [8])
    assert grouped(tracker(groups=(WINDOW,)), plan([0, 1], [9, 9])) is None


def test_rows_move_with_all_that_is_theirs() -> None:
    before = plan([3, 5, 6], [4, 5, 6])
    before = evolve(before, num_logits=np.array([1, 2, 3]), samples=np.array([0, 1, 1]))
    after = sort_rows(before, np.array([2, 0, 1]))
    assert (after.rows.tolist(), after.starts.tolist()) == ([6, 3, 5], [6, 4, 5])
    assert after.stops.tolist() == [7, 5, 6]
    assert after.admission_ids.tolist() == [106, 103, 105]
    assert (after.num_logits.tolist(), after.samples.tolist()) == ([3, 1, 2], [1, 0, 1])


def test_rows_behind_those_that_move_stay() -> None:
    order = keep_prompts(np.array([2, 0, 1]), 5)
    assert order.tolist() == [2, 0, 1, 3, 4]
    mixed = plan([3, 5, 6, 7, 8], [4, 5, 6, 7, 0], num_decode=3, lens=[1, 1, 1, 9, 2])
    after = sort_rows(mixed, order)
    assert (after.rows.tolist(), after.starts.tolist()) == ([6, 3, 5, 7, 8], [6, 4, 5, 7, 0])
    assert (after.stops.tolist(), after.num_decode) == ([7, 5, 6, 16, 2], 3)


@pytest.mark.full
def test_grouping_256_rows_takes_no_longer_than_a_launch() -> None:
    table = np.arange(256 * 40, dtype=np.int32).reshape(256, 40) + 100
    table[:, :32] = np.arange(1, 33)
    max_pages = np.full(256, 34)
    times = timeit.repeat(lambda: group_rows([table], max_pages, 8), number=20, repeat=30)
    assert min(times) / 20 < 200e-6
