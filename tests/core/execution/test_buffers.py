"""The device's buffers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from headstock.execution.buffers import (
    MAX_CLEANED_PAGES,
    MAX_COPIED_BYTES,
    BufferShape,
    allocate_buffers,
)
from headstock.scheduler import Plan
from headstock.spi import FullKV, KVGroup, StateKV, StateTensor

FULL = FullKV(kv_heads=1, k_dim=2, v_dim=2)
NOBODY = np.zeros(0, np.int32)
EMPTY = Plan(
    number=0,
    num_decode=0,
    rows=NOBODY,
    admission_ids=NOBODY,
    starts=NOBODY,
    stops=NOBODY,
    num_logits=NOBODY,
    samples=NOBODY,
)


class Largest(TorchDispatchMode):
    """Remembers the most bytes that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # A view makes none.
        given = [
            each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)
        ]
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in given:
            self.bytes = max(self.bytes, out.nbytes)
        return out


def test_cleaning_takes_no_room_for_pages_that_a_row_does_not_have() -> None:
    group = KVGroup(layers=(0,), layout=FullKV(kv_heads=2, k_dim=64, v_dim=64))
    shape = BufferShape(
        groups=(group,),
        device=torch.device("cpu"),
        kv_dtype=torch.float32,
        page_size=16,
        rows=8,
    )
    buffers = allocate_buffers(shape, (5 * MAX_CLEANED_PAGES,), 16 * 5000)
    buffers.page_tables[0][:8, 0] = torch.arange(1, 9)
    buffers.page_tables[0][3, :200] = torch.arange(1, 201)  # shared pages among them
    buffers.pools[0][1:].fill_(math.nan)

    with Largest() as largest:
        buffers.zero_non_finite(np.arange(8), buffers.page_tables)

    assert buffers.pools[0][1:201].isfinite().all() and buffers.pools[0][201:].isnan().all()
    assert largest.bytes <= MAX_CLEANED_PAGES * buffers.pools[0][0].nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_pages_of_failed_rows_become_finite_and_others_stay(dtype: torch.dtype) -> None:
    group = KVGroup(layers=(0, 1), layout=FullKV(kv_heads=2, k_dim=4, v_dim=4))
    shape = BufferShape(
        groups=(group,), device=torch.device("cpu"), kv_dtype=dtype, page_size=4, rows=3
    )
    buffers = allocate_buffers(shape, (5,), 12)
    buffers.page_tables[0][1, :2] = torch.tensor([4, 2], dtype=torch.int32)
    buffers.page_tables[0][2, :2] = torch.tensor([3, 2], dtype=torch.int32)
    for pool in buffers.pools:
        pool.copy_(torch.arange(pool.numel()).view(pool.shape).remainder(97).to(dtype))
    before = [pool.clone() for pool in buffers.pools]
    for pool in buffers.pools:
        values = pool.float()
        values[2:5, 0, 1] = math.nan
        pool.copy_(values.to(dtype))

    then = tuple(table.clone() for table in buffers.page_tables)
    # another request's by now
    buffers.page_tables[0][1] = torch.tensor([3, 5, 0], dtype=torch.int32)
    buffers.zero_non_finite(np.array([1]), then)

    for pool, old in zip(buffers.pools, before, strict=True):
        assert pool[[2, 4]].float().isfinite().all() and (pool[[2, 4], 0, 1].float() == 0).all()
        assert pool[3, 0, 1].float().isnan().all()
        old = old.float()
        old[[2, 4], 0, 1] = 0
        assert torch.equal(pool.float()[[0, 1, 2, 4, 5]], old[[0, 1, 2, 4, 5]])


@pytest.mark.parametrize("failed", [0, 1])
def test_each_group_has_pages_of_its_own_to_clean(failed: int) -> None:
    """Group 1 has fewer pages than the numbers in group 0's table."""
    layout = FullKV(kv_heads=1, k_dim=2, v_dim=2)
    groups = KVGroup(layers=(0, 2), layout=layout), KVGroup(layers=(1,), layout=layout, window=3)
    shape = BufferShape(
        groups=groups, device=torch.device("cpu"), kv_dtype=torch.float32, page_size=2, rows=2
    )
    buffers = allocate_buffers(shape, (9, 2), 12)
    assert [len(pool) for pool in buffers.pools] == [10, 3, 10]
    owned = [{0: (9, 4, 2), 1: (7,)}, {0: (1,), 1: (2,)}]
    for table, pages_by_row in zip(buffers.page_tables, owned, strict=True):
        for row, pages in pages_by_row.items():
            table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
    for pool in buffers.pools:
        pool[1:].fill_(math.nan)

    buffers.zero_non_finite(np.array([failed]), buffers.page_tables)

    for number, group in enumerate(groups):
        for layer in group.layers:
            cleaned = buffers.pools[layer].isfinite().flatten(1).all(1).nonzero().flatten()
            assert set(cleaned.tolist()) == {0, *owned[number][failed]}


@given(st.data())
def test_the_one_row_that_a_plan_admits_has_its_tokens_and_pages_and_no_others(
    data: st.DataObject,
) -> None:
    groups = tuple(
        KVGroup(layers=(layer,), layout=FullKV(kv_heads=1, k_dim=4, v_dim=4))
        for layer in range(data.draw(st.integers(1, 2)))
    )
    shape = BufferShape(
        groups=groups, device=torch.device("cpu"), kv_dtype=torch.float32, page_size=4, rows=3
    )
    buffers = allocate_buffers(shape, (9,) * len(groups), 20)
    for table in (buffers.tokens, *buffers.page_tables):
        table.copy_(torch.arange(1, table.numel() + 1).view(table.shape))  # of earlier requests
    row = data.draw(st.integers(0, 2))
    tokens = np.array(data.draw(st.lists(st.integers(0, 99), max_size=20)), np.int32)
    entry = st.tuples(st.integers(0, len(groups) - 1), st.integers(0, 4), st.integers(0, 9))
    entries = np.array(data.draw(st.lists(entry, max_size=12)), np.int32).reshape(-1, 3)
    tokens_wanted, *wanted = (
        table.numpy().copy() for table in (buffers.tokens, *buffers.page_tables)
    )
    tokens_wanted[row, : len(tokens)] = tokens
    for table in wanted:
        table[row] = 0
    for group, column, page in entries.tolist():  # later ones take the places of earlier ones
        wanted[group][row, column] = page
    one = np.ones(1, np.int32)
    plan = Plan(
        number=0,
        num_decode=0,
        rows=one * row,
        admission_ids=one,
        starts=0 * one,
        stops=one,
        num_logits=one,
        samples=one,
        page_groups=entries[:, 0],
        page_rows=np.full(len(entries), row, np.int32),
        page_columns=entries[:, 1],
        page_numbers=entries[:, 2],
    )

    buffers.apply_plan(plan, {row: tokens})

    assert np.array_equal(buffers.tokens.numpy(), tokens_wanted)
    for table, right in zip(buffers.page_tables, wanted, strict=True):
        assert np.array_equal(table.numpy(), right)


@pytest.mark.parametrize("most", [8, 100, 1 << 20])
@given(
    moves=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 6), st.integers(1, 6)), max_size=9)
)
def test_states_are_copied_as_they_were_before_any_copy(
    most: int, moves: list[tuple[int, int, int]]
) -> None:
    state = StateKV(tensors=(StateTensor("a", (3,)), StateTensor("b", (9,), "float64")))
    groups = tuple(
        KVGroup(layers=layers, layout=layout)
        for layers, layout in (((0, 3), state), ((1,), FULL), ((2,), state))
    )
    shape = BufferShape(
        groups=groups, device=torch.device("cpu"), kv_dtype=torch.float32, page_size=4, rows=3
    )
    buffers = allocate_buffers(shape, (6, 6, 6), 12)
    for pool in buffers.pools:
        flat = pool.view(torch.uint8) if pool.dtype == torch.uint8 else pool
        flat.copy_(torch.arange(flat.numel()).view(flat.shape).remainder(251))
    # Each page is written once, as plans have it.
    copies = {(2 * group, target): source for group, source, target in moves}
    wanted = [pool.clone() for pool in buffers.pools]
    for (group, target), source in copies.items():
        for layer in groups[group].layers:
            wanted[layer][target] = buffers.pools[layer][source]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headstock.execution.buffers.MAX_COPIED_BYTES", most)
        buffers.apply_plan(
            evolve(EMPTY, copies=np.array([(g, s, t) for (g, t), s in copies.items()], np.int32)),
            {},
        )

    for pool, right in zip(buffers.pools, wanted, strict=True):
        assert torch.equal(pool, right)


def test_copies_of_many_states_take_little_room() -> None:
    state = StateKV(tensors=(StateTensor("a", (1 << 18,)),))
    shape = BufferShape(
        groups=(KVGroup(layers=(0, 1), layout=state),),
        device=torch.device("cpu"),
        kv_dtype=torch.float32,
        page_size=4,
        rows=3,
    )
    buffers = allocate_buffers(shape, (200,), 12)
    buffers.pools[1][1:101] = 7
    pages = np.arange(1, 101, dtype=np.int32)

    with Largest() as largest:
        buffers.apply_plan(evolve(EMPTY, copies=np.stack([0 * pages, pages, pages + 100], 1)), {})

    assert (buffers.pools[1][101:201] == 7).all() and not buffers.pools[0].any()
    assert largest.bytes <= MAX_COPIED_BYTES
