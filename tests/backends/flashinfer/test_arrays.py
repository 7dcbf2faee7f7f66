"""What the planner is told, against the same counted row by row."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headstock_fi.arrays import pad_lens, page_arrays, table_places

ROWS = st.lists(st.tuples(st.integers(1, 200), st.integers(0, 300)), min_size=1, max_size=12)


@given(rows=ROWS, page_size=st.sampled_from([1, 3, 16, 64, 128]), spare=st.integers(0, 3))
def test_the_arrays_are_those_counted_row_by_row(
    rows: list[tuple[int, int]], page_size: int, spare: int
) -> None:
    queries = np.array([query for query, _ in rows], np.int32)
    contexts = np.array([query + before for query, before in rows], np.int32)
    arrays = page_arrays(queries, contexts, page_size)
    columns = int((-(-contexts // page_size)).max()) + spare
    table = np.arange(len(rows) * columns, dtype=np.int32).reshape(len(rows), columns) + 7
    found = table.reshape(-1)[table_places(arrays.page_start, columns)]
    query_start, page_start, last, pages = [0], [0], [], []
    for row, (query, context) in enumerate(zip(queries.tolist(), contexts.tolist(), strict=True)):
        count = 0
        while count * page_size < context:
            pages.append(table[row, count])
            count += 1
        query_start.append(query_start[-1] + query)
        page_start.append(page_start[-1] + count)
        last.append(context - (count - 1) * page_size)
    assert arrays.query_start.tolist() == query_start
    assert arrays.page_start.tolist() == page_start
    assert arrays.last_page_lens.tolist() == last
    assert arrays.num_pages == len(pages)
    assert found.tolist() == pages
    assert {
        each.dtype for each in (arrays.query_start, arrays.page_start, arrays.last_page_lens, found)
    } == {np.dtype(np.int32)}


def test_padding_rows_have_one_token() -> None:
    assert pad_lens(np.array([5, 9], np.int32), 4).tolist() == [5, 9, 1, 1]
