"""Plans for kernels that read the device, and the rows at fixed addresses that graphs read."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from headstock.nn.attention.paged_plan import PagedPlan
from headstock.nn.attention.static_rows import StaticRows
from headstock.spi import AttentionStep, Phase
from headstock_conformance import attention as cases

CPU = torch.device("cpu")


def decode(*lens: int, groups: int = 1) -> AttentionStep:
    """A step of rows with these contexts, the pages of group g numbered from 10 * g."""
    tables = tuple(
        torch.arange(len(lens) * 3, dtype=torch.int32).view(-1, 3) + 1 + 10 * group
        for group in range(groups)
    )
    return cases.step_of(Phase.DECODE, [(1, length) for length in lens], tables)


@given(lens=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 3000)), min_size=1, max_size=12))
def test_contexts_start_where_numpy_says(lens: list[tuple[int, int]]) -> None:
    rows = [(query, query + before) for query, before in lens]
    plan = PagedPlan.of(
        cases.step_of(Phase.EXTEND, rows, (torch.zeros((len(rows), 4), dtype=torch.int32),))
    )
    contexts = np.array([context for _, context in rows])
    assert plan.context_start.tolist() == np.concatenate([[0], contexts.cumsum()]).tolist()
    assert plan.context_start.dtype == torch.int32
    numbers = (len(rows), max(query for query, _ in rows), contexts.max(), False)
    assert (plan.num_rows, plan.max_query_len, plan.max_context_len, plan.is_decode) == numbers


def test_a_page_table_is_dense_and_copied_only_when_it_was_not() -> None:
    dense = torch.zeros(2, 3, dtype=torch.int32)
    (same, copied) = PagedPlan.of(
        cases.step_of(
            Phase.DECODE, [(1, 5), (1, 9)], (dense, torch.ones(2, 9, dtype=torch.int32)[:, ::3])
        )
    ).page_tables
    assert same is dense
    assert copied.is_contiguous() and copied.tolist() == [[1, 1, 1], [1, 1, 1]]


def test_rows_are_padding_until_a_step_is_written_and_where_it_has_none() -> None:
    static = StaticRows.new(4, 100, 16, CPU)
    step = static.step(4, groups=2)
    assert step.query_start.tolist() == [0, 1, 2, 3, 4]
    assert step.context_lens.tolist() == [1] * 4 and not any(
        table.any() for table in step.page_tables
    )

    static.write(4, decode(7, 8, 9, 10, groups=2))
    static.write(4, decode(5, 6, groups=2))

    assert step.context_lens.tolist() == [5, 6, 1, 1]
    for table, first in zip(step.page_tables, (1, 11), strict=True):
        assert table[:2, :3].flatten().tolist() == list(range(first, first + 6))
        assert table[2:, 0].tolist() == [0, 0]


def test_a_smaller_bucket_is_the_first_rows_of_the_largest() -> None:
    static = StaticRows.new(4, 100, 16, CPU)
    large, small = static.step(4, groups=1), static.step(2, groups=1)
    static.write(4, decode(7, 8, 9, 10))
    static.write(2, decode(5))

    assert small.context_lens.tolist() == [5, 1] and large.context_lens.tolist() == [5, 1, 9, 10]
    assert small.page_tables[0].data_ptr() == large.page_tables[0].data_ptr()
    assert (large.num_rows, large.max_query_len, large.max_context_len) == (4, 1, 100)
    assert static.memory_bytes() == 4 * (5 + 4 + 4 * 7)
