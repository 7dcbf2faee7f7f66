"""The device's buffers: allocated once, written in place by this module and by steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, product
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from headstock.execution.kv_pools import allocate_pool, allocate_state_pools, view_layer
from headstock.scheduler import Plan
from headstock.spi import KVGroup, KVLayer, LayoutKind, StateKV
from headstock.spi.arrays import Ints

MAX_CLEANED_PAGES = 64
"""Pages of one copy in `zero_non_finite`; the pool leaves little memory for copies."""

MAX_COPIED_BYTES = 1 << 26
"""Bytes of states that one copy reads at once, for the same reason."""

_NONE = np.zeros(0, np.int64)


@frozen(kw_only=True, eq=False)
class Buffers:
    """What lives on the device between steps.

    All uploads go to the stream that runs the steps. So a table may be written while the previous
    step still runs: the write comes after its kernels.

    groups: the KV groups, each with pages of its own
    pools: by layer, [pages + 1, *page] as `kv_pools.page_shape` says; page 0 is the dummy page,
        which is always finite
    kv: by layer, views of the pools by their parts
    state_pools: by group that keeps a state, its layers' pools in one piece,
        [layers, pages + 1, bytes] uint8
    page_tables: by group, [rows + 1, columns] int32, 0 past a row's last page; one column for a
        group with a state
    tokens: [rows + 1, max_len + 1] int64, every token known or sampled so far
    The last row of the tables is the padding row.
    """

    device: torch.device
    page_size: int
    groups: tuple[KVGroup, ...]
    pools: tuple[Tensor, ...]
    page_tables: tuple[Tensor, ...]
    tokens: Tensor
    kv: tuple[KVLayer, ...] = ()
    state_pools: Mapping[int, Tensor] = MappingProxyType({})

    @property
    def attention_tables(self) -> tuple[Tensor, ...]:
        """The page tables of the groups that keep tokens."""
        if not self.state_pools:
            return self.page_tables
        return tuple(
            table for group, table in enumerate(self.page_tables) if group not in self.state_pools
        )

    @property
    def num_draft_pages(self) -> int:
        """How many pages for states behind drafts a row has in each group that keeps a state."""
        return max((self.page_tables[group].shape[1] for group in self.state_pools), default=1) - 1

    def to_device(self, array: Ints | Tensor) -> Tensor:
        """Copy the array to the device, through pinned memory on a GPU."""
        if isinstance(array, Tensor):
            return array
        # The scheduler makes its arrays read-only, and torch warns of making a tensor of one.
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        # From pageable memory the copy would first wait for the steps on the stream. torch keeps
        # the pinned memory until the copy is over, though nothing here refers to it any more.
        return (
            tensor
            if self.device.type == "cpu"
            else tensor.pin_memory().to(self.device, non_blocking=True)
        )

    def to_device_packed(self, *arrays: Ints) -> list[Tensor]:
        """Copy the arrays to the device by one transfer: every other costs the host some 25 us."""
        if self.device.type == "cpu":
            return [self.to_device(array) for array in arrays]
        device = self.pack(*arrays).to(self.device, non_blocking=True)
        return unpack(device, *arrays)

    def pack(self, *arrays: Ints) -> Tensor:
        """Copy the arrays into one host tensor, which is pinned if they are for a GPU.

        returns: [bytes] uint8, as `unpack` takes it
        """
        starts = _find_parts(arrays)
        host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=self.device.type != "cpu")
        packed = host.numpy()
        for start, array in zip(starts, arrays, strict=False):
            packed[start : start + array.nbytes] = (
                np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            )
        return host

    def copy_into(self, part: Tensor, values: Ints) -> None:
        """Copy the values to where they belong, by a transfer and without a kernel.

        part: of a buffer, one piece of memory
        writes: part
        """
        host = torch.empty(part.shape, dtype=part.dtype, pin_memory=part.is_cuda)
        host.numpy()[:] = values
        part.copy_(host, non_blocking=True)

    def as_native(self, array: Ints | Tensor) -> Any:
        """Convert the array to what indexes small arrays fast here.

        That is numpy on a CPU (1.6 us, torch 2.8), sharing memory with `array`; else a tensor.
        """
        if self.device.type != "cpu":
            return self.to_device(array)
        return array.numpy() if isinstance(array, Tensor) else array

    def apply_plan(self, plan: Plan, new_rows: dict[int, Ints]) -> None:
        """Bring the tables up to date with a plan that is about to run, and copy its states.

        new_rows: the tokens of each row that the plan admits
        writes: page_tables, tokens, and the pools of states
        """
        if len(plan.drafts):
            self._store_drafts(plan)
        if new_rows or len(plan.page_rows):
            self._write_tables(plan, new_rows)
        # Last: a plan that fails before is applied again, and copies made twice would be others.
        if len(plan.copies):
            self._copy_states(plan.copies)

    def _write_tables(self, plan: Plan, new_rows: dict[int, Ints]) -> None:
        """Write the tokens and pages of rows.   writes: page_tables, tokens"""
        if len(new_rows) == 1 and (plan.page_rows == next(iter(new_rows))).all():
            self._write_row(plan, *next(iter(new_rows.items())))
            return
        entries = [self._page_entries(plan, group) for group in range(len(self.page_tables))]
        width = self.tokens.shape[1]
        places = [np.arange(row * width, row * width + len(new_rows[row])) for row in new_rows]
        # Few launches for any number of rows, and few for one: under load a step admits tens of
        # rows, and an idle engine's first token waits for these.
        put = self.to_device_packed(
            np.fromiter(new_rows, np.int64, len(new_rows)),
            np.concatenate([*places, _NONE]),
            np.concatenate([*new_rows.values(), _NONE], dtype=np.int64),
            *(array for entry in entries for array in entry),
        )
        # Tables first, entries after: a plan may admit a request to a row and give it pages.
        if new_rows:
            new, at, tokens = put[:3]
            for table in self.page_tables:
                # The whole row: replays gather every column, and what an earlier request left
                # behind this one's last page names pages that are now another's.
                table.index_fill_(0, new, 0)
            self.as_native(self.tokens.view(-1))[self.as_native(at)] = self.as_native(tokens)
        for group, table in enumerate(self.page_tables):
            rows, columns, pages = map(self.as_native, put[3 + 3 * group :][:3])
            if len(rows):
                self.as_native(table)[rows, columns] = pages

    def _write_row(self, plan: Plan, row: int, tokens: Ints) -> None:
        """Write the one row that the plan admits, of which all its page-table entries are.

        An idle engine's first token waits for this. Copies take the host half of what an index
        takes, which needs copies too and then a kernel.

        tokens: [n] int32
        writes: page_tables, tokens
        """
        self.copy_into(self.tokens[row, : len(tokens)], tokens)
        for group, table in enumerate(self.page_tables):
            columns, numbers = plan.page_columns, plan.page_numbers
            if len(self.page_tables) > 1:
                of_group = plan.page_groups == group
                columns, numbers = columns[of_group], numbers[of_group]
            # The whole row, as `apply_plan` says; numpy keeps the last of entries for one place.
            pages = np.zeros(table.shape[1], np.int32)
            pages[columns] = numbers
            self.copy_into(table[row], pages)

    def _copy_states(self, copies: Ints) -> None:
        """Copy pages of states; all are read before any is written.

        copies: [m, 3] int32, as `Plan.copies`
        writes: pools
        """
        groups = copies[:, 0]
        for group, pool in self.state_pools.items():
            pairs = copies[groups == group, 1:]
            if len(pairs):
                (at,) = self.to_device_packed(np.ascontiguousarray(pairs.T, np.int64))
                _copy_pages(pool, at[0], at[1])

    def _store_drafts(self, plan: Plan) -> None:
        """Write the plan's drafts to the token table, where its step reads them.

        writes: tokens
        """
        # No row has a token in flight: it would not have been planned before that is known. So
        # nothing that runs still writes these places.
        is_known = plan.drafts >= 0  # the model's own layers wrote the others here
        if not is_known.any():
            return
        places = (each[is_known] for each in plan.draft_places)
        at = self.to_device_packed(*places, plan.drafts[is_known].astype(np.int64))
        rows, positions, drafts = map(self.as_native, at)
        self.as_native(self.tokens)[rows, positions] = drafts

    def _page_entries(self, plan: Plan, group: int) -> tuple[Ints, Ints, Ints]:
        """Select the rows, columns and pages that the plan writes to a group's table."""
        rows, columns, pages = plan.page_rows, plan.page_columns, plan.page_numbers
        if len(self.page_tables) > 1:
            of_group = plan.page_groups == group
            rows, columns, pages = rows[of_group], columns[of_group], pages[of_group]
        return self._drop_overwritten(rows.astype(np.int64), columns.astype(np.int64), pages)

    def _drop_overwritten(self, rows: Ints, columns: Ints, pages: Ints) -> tuple[Ints, Ints, Ints]:
        """Drop the entries that a later one overwrites: a GPU writes all in any order."""
        if self.device.type == "cpu":
            return rows, columns, pages
        _, last = np.unique((rows * self.tokens.shape[1] + columns)[::-1], return_index=True)
        indices = len(rows) - 1 - last
        return rows[indices], columns[indices], pages[indices]

    def store_tokens(self, rows: Ints, positions: Ints, tokens: Tensor) -> None:
        """Write sampled tokens to the token table.

        rows, positions: [n] int32    tokens: [n] int64
        writes: tokens
        """
        # Written on the device, right behind the step: the next step reads the tokens here before
        # the host has read them back.
        if self.device.type == "cpu":
            self.tokens.numpy()[rows, positions] = tokens.numpy()
            return
        at = self.to_device_packed(rows.astype(np.int64), positions.astype(np.int64))
        self.tokens[*at] = tokens

    def snapshot_page_tables(self) -> tuple[Tensor, ...]:
        """Return the page tables of the step that is launched now, valid until it is collected.

        On a GPU these are copies, because the next step may write its rows' entries before that. On
        a CPU it runs only after this one is collected.
        """
        return (
            self.page_tables
            if self.device.type == "cpu"
            else tuple(table.clone() for table in self.page_tables)
        )

    @torch.inference_mode()
    def zero_non_finite(self, rows: Ints, page_tables: tuple[Tensor, ...]) -> None:
        """Set non-finite numbers to 0 in the pages that these rows have in `page_tables`.

        Some kernels read the whole last page of a row, and NaN times a weight of 0 is NaN. So NaN
        that a failed row leaves behind would spoil the next row with its page.

        rows: [n] int64
        writes: pools
        """
        device_rows = self.to_device(rows)
        # Groups have pages of their own: a number that one has may be past the end of another.
        for group, table in zip(self.groups, page_tables, strict=True):
            pages = torch.bincount(table[device_rows].flatten()).nonzero().flatten()
            # A state has tensors of several types, and each is cleaned as what it is.
            pools = [
                part
                for layer in group.layers
                for part in (self.kv[layer].state.values() or (self.pools[layer],))
            ]
            for pool, some in product(pools, torch.split(pages, MAX_CLEANED_PAGES)):
                _zero_pages(pool, some)


def _copy_pages(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy pages of all layers; all are read before any is written.

    pool: [layers, pages, bytes] uint8    sources, targets: [n] int64
    writes: pool
    """
    # As words: pages of states are multiples of them, and there are fewer.
    words = pool.view(torch.int64)
    num_layers, _, width = words.shape
    # In parts, of layers or of each page: none of them reads what another one writes.
    layer_bytes = len(sources) * width * 8
    layers = max(MAX_COPIED_BYTES // layer_bytes, 1)
    size = max(min(width, width * MAX_COPIED_BYTES // layer_bytes), 1)
    for layer, start in product(range(0, num_layers, layers), range(0, width, size)):
        part = words[layer : layer + layers, :, start : start + size]
        part[:, targets] = part[:, sources]


def _zero_pages(pool: Tensor, pages: Tensor) -> None:
    """Set non-finite numbers to 0 in these pages.   writes: pool"""
    # torch indexes 8-bit floats as bytes only; NaN is 0x7F with either sign
    if pool.dtype.itemsize == 1:
        pool_bytes = pool.view(torch.uint8)
        part = pool_bytes[pages]
        pool_bytes[pages] = part.masked_fill_((part & 0x7F) == 0x7F, 0)
    else:
        pool[pages] = pool[pages].nan_to_num_(0.0, 0.0, 0.0)


def unpack(memory: Tensor, *arrays: Ints) -> list[Tensor]:
    """Make views of packed memory, one an array, of its shape and type."""
    return [
        memory[start : start + array.nbytes]
        .view(getattr(torch, array.dtype.name))
        .view(array.shape)
        for start, array in zip(_find_parts(arrays), arrays, strict=False)
    ]


def _find_parts(arrays: Sequence[Ints]) -> list[int]:
    """Find where each array begins in packed memory, and where the last one ends."""
    # Views of any type must begin at multiples of its size; kernels like those of 16 bytes.
    return [0, *accumulate(-(-array.nbytes // 16) * 16 for array in arrays)]


@frozen(kw_only=True)
class BufferShape:
    """What is known of a device's buffers before their memory is planned.

    kv_dtype: of keys and values    dtype: of states that name no type
    state_pages: of a row, in each group that keeps a state
    """

    groups: tuple[KVGroup, ...]
    device: torch.device
    kv_dtype: torch.dtype
    dtype: torch.dtype = torch.float32
    page_size: int
    rows: int
    state_pages: int = 1


def allocate_buffers(shape: BufferShape, num_pages: Sequence[int], max_len: int) -> Buffers:
    """Allocate buffers for `num_pages` usable pages of each group, all zero."""
    groups, device, rows = shape.groups, shape.device, shape.rows
    page_size, dtype = shape.page_size, shape.dtype
    columns = -(-max_len // page_size)
    pools: dict[int, Tensor] = {}
    kv: dict[int, KVLayer] = {}
    state_pools: dict[int, Tensor] = {}
    for number, (group, count) in enumerate(zip(groups, num_pages, strict=True)):
        if isinstance(group.layout, StateKV):
            state_pools[number] = allocate_state_pools(
                group.layout, len(group.layers), count, dtype=dtype, device=device
            )
            pools |= zip(group.layers, state_pools[number].unbind(), strict=True)
        for layer in group.layers:
            if number not in state_pools:
                pools[layer] = allocate_pool(
                    group, count, page_size, kv_dtype=shape.kv_dtype, dtype=dtype, device=device
                )
            kv[layer] = view_layer(pools[layer], number, group, page_size, dtype)
    return Buffers(
        device=device,
        page_size=page_size,
        groups=groups,
        pools=tuple(pools[layer] for layer in range(len(pools))),
        kv=tuple(kv[layer] for layer in range(len(kv))),
        page_tables=tuple(
            torch.zeros(
                (
                    rows + 1,
                    shape.state_pages if group.layout.kind is LayoutKind.STATE else columns,
                ),
                dtype=torch.int32,
                device=device,
            )
            for group in groups
        ),
        tokens=torch.zeros((rows + 1, max_len + 1), dtype=torch.int64, device=device),
        state_pools=state_pools,
    )
