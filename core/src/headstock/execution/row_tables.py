"""Batches and attention steps out of the device's tables, for steps with and without graphs.

Core constructs these records here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from headstock.execution.buffers import Buffers, unpack
from headstock.execution.prefix_step import bound_prefixes, pad_groups, split_step
from headstock.spi import (
    AttentionStep,
    Batch,
    Phase,
    PrefixGroups,
    PrefixInputs,
    PromptInputs,
    PromptStep,
    RowTables,
    Sample,
    Sampling,
)
from headstock.spi.arrays import Ints

if TYPE_CHECKING:
    from headstock.execution.sampling_inputs import DeviceColumns


def make_batch(
    buffers: Buffers,
    *,
    row_ids: Tensor,
    starts: Tensor,
    query_start: Tensor,
    token_rows: Tensor,
    positions: Tensor,
    max_query_len: int,
    logit_indices: Tensor | None,
    sampling: Sampling,
    by_numpy: bool,
) -> Batch:
    """Make the batch of these rows and tokens; what the arguments leave out is looked up.

    by_numpy: look up by numpy, on a CPU alone; else by operations that a graph may capture
    """
    look_up = look_up_arrays if by_numpy else look_up_tensors
    tokens, slots = look_up(buffers, token_rows, positions)
    return Batch(
        tokens=tokens,
        positions=positions,
        token_rows=token_rows,
        row_ids=row_ids,
        starts=starts,
        query_start=query_start,
        max_query_len=max_query_len,
        slots=slots,
        pools=buffers.pools,
        logit_indices=logit_indices,
        sampling=sampling,
    )


def look_up_tensors(
    buffers: Buffers, token_rows: Tensor, positions: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Look up the tokens and, by group, the slots where their keys and values go.

    token_rows, positions, returns: [tokens] int64
    """
    # Few operations: a graph of a decode step pays for each in every replay. Tokens come from the
    # device's table: with overlap the host has not seen the newest ones yet.
    size = buffers.page_size
    columns, offsets = positions.div(size, rounding_mode="floor"), positions % size
    slots = (offsets.add(table[token_rows, columns], alpha=size) for table in buffers.page_tables)
    return buffers.tokens[token_rows, positions], tuple(slots)


def look_up_arrays(
    buffers: Buffers, token_rows: Tensor, positions: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Do as `look_up_tensors` by numpy, which indexes small arrays in 1.6 us, torch in 2.8."""
    size, rows, at = buffers.page_size, token_rows.numpy(), positions.numpy()
    columns = at // size
    offsets = at - columns * size
    slots = (
        torch.from_numpy(table.numpy()[rows, columns] * size + offsets)
        for table in buffers.page_tables
    )
    return torch.from_numpy(buffers.tokens.numpy()[rows, at]), tuple(slots)


def make_attention_step(
    buffers: Buffers,
    phase: Phase,
    *,
    row_ids: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    host_query_lens: Ints,
    host_context_lens: Ints,
    by_numpy: bool,
) -> AttentionStep:
    """Make the attention step of these rows; their page tables are looked up.

    row_ids: [rows] int64
    by_numpy: as in `make_batch`
    """
    # Only the columns that some row uses: tables of the longest context would be copied whole. From
    # the host's lengths: those on the device would have to be waited for, and a capture cannot read
    # them.
    columns = -(-int(host_context_lens.max()) // buffers.page_size)
    tables = buffers.page_tables
    if by_numpy:
        rows = row_ids.numpy()
        gathered = tuple(torch.from_numpy(table.numpy()[rows, :columns]) for table in tables)
    else:
        gathered = tuple(table[:, :columns].index_select(0, row_ids) for table in tables)
    return AttentionStep(
        phase=phase,
        query_start=query_start,
        context_lens=context_lens,
        page_tables=gathered,
        host_query_lens=host_query_lens,
        host_context_lens=host_context_lens,
    )


class DeviceTables(RowTables):
    """The row tables of a device: its buffers and its columns of sampling settings."""

    def __init__(self, buffers: Buffers, columns: DeviceColumns) -> None:
        self.buffers = buffers
        # 0, 1, 2, ..., made once: a graph would else make it in every replay.
        self.counts = torch.arange(
            len(buffers.tokens) + 1, dtype=torch.int32, device=buffers.device
        )
        temperature, top_p, min_p = columns.floats
        top_k, self.seeds = columns.integers
        self.settings: Mapping[str, Any] = {
            "temperature": temperature,
            "top_p": top_p,
            "min_p": min_p,
            "top_k": top_k,
        }

    @property
    def device(self) -> torch.device:
        """Where the tables lie."""
        return self.buffers.device

    @property
    def padding_row(self) -> int:
        """The last row of the tables."""
        return len(self.buffers.tokens) - 1

    def batch(self, row_ids: Tensor, starts: Tensor, query_len: int) -> Batch:
        """Make the batch in which each row computes `query_len` tokens, every one scored."""
        token_rows, positions = row_ids, starts
        if query_len > 1:
            token_rows = row_ids.repeat_interleave(query_len)
            positions = (starts[:, None] + self._count_from_zero(query_len)).flatten()
        return make_batch(
            self.buffers,
            row_ids=row_ids,
            starts=starts,
            query_start=self._query_start(len(row_ids), query_len),
            token_rows=token_rows,
            positions=positions,
            max_query_len=query_len,
            logit_indices=None,
            sampling=Sampling(),
            by_numpy=False,
        )

    def attention_step(
        self,
        row_ids: Tensor,
        starts: Tensor,
        query_len: int,
        host_lens: np.ndarray,
        prefixes: PrefixInputs | None = None,
    ) -> AttentionStep:
        """Make the attention step of that batch."""
        # Cast and addition in one operation.
        lens = torch.add(starts, query_len, out=torch.empty_like(starts, dtype=torch.int32))
        step = make_attention_step(
            self.buffers,
            Phase.DECODE if query_len == 1 else Phase.EXTEND,
            row_ids=row_ids,
            query_start=self._query_start(len(row_ids), query_len),
            context_lens=lens,
            host_query_lens=np.full_like(host_lens, query_len),
            host_context_lens=host_lens,
            by_numpy=False,
        )
        if prefixes is None:
            return step
        starts, lens = prefixes.group_starts, prefixes.shared_lens
        bounds = bound_prefixes(len(row_ids), len(starts) - 1, step.max_context_len)
        return split_step(step, starts, lens, bounds, self.buffers.page_size)

    def prefix_inputs(self, num_rows: int) -> PrefixInputs:
        """Allocate the inputs of decode steps of at most so many rows, without groups."""
        none = np.zeros(0, np.int32)
        arrays = pad_groups(PrefixGroups(counts=none, lens=none), num_rows)
        memory = self.buffers.pack(*arrays).to(self.device)
        group_starts, shared_lens = unpack(memory, *arrays)
        return PrefixInputs(memory=memory, group_starts=group_starts, shared_lens=shared_lens)

    def write_prefix_inputs(self, inputs: PrefixInputs, groups: PrefixGroups) -> None:
        """Bring the inputs up to date with a step's groups, by one copy.   writes: inputs"""
        arrays = pad_groups(groups, len(inputs.shared_lens))
        inputs.memory.copy_(self.buffers.pack(*arrays), non_blocking=True)

    def _query_start(self, num_rows: int, query_len: int) -> Tensor:
        """Where the tokens of equally long rows begin and end. [rows + 1] int32"""
        if query_len == 1:
            return self._count_from_zero(num_rows + 1)
        return torch.arange(
            0, (num_rows + 1) * query_len, query_len, dtype=torch.int32, device=self.device
        )

    def _count_from_zero(self, count: int) -> Tensor:
        """The first `count` numbers.   returns: [count] int32"""
        if count <= len(self.counts):
            return self.counts[:count]
        return torch.arange(count, dtype=torch.int32, device=self.device)

    def sampling(self, row_ids: Tensor, positions: Tensor, kind: frozenset[str]) -> Sampling:
        """Select the columns that `kind` names, for the tokens that come to these positions."""
        # Greedy rows skip the noise over the vocabulary.
        if not kind:
            return Sampling()
        columns = {name: self.settings[name][row_ids] for name in sorted(kind)}
        return Sampling(**columns, seeds=self.seeds[row_ids], positions=positions)

    def keep(self, row_ids: Tensor, positions: Tensor, sample: Sample) -> None:
        """Write the sampled tokens to the token table.   writes: the token table"""
        self.buffers.tokens[row_ids, positions] = sample.tokens

    def prompt_inputs(self, num_rows: int, num_tokens: int) -> PromptInputs:
        """Allocate the inputs of prompt steps of at most this size; all of them is padding."""
        # One token of the padding row: captured work takes hidden states at the end of each row.
        nothing = np.zeros(1, np.int64)
        arrays = _pad_prompt(
            (nothing + self.padding_row, nothing, nothing + 1),
            num_rows,
            num_tokens,
            self.padding_row,
        )
        memory = self.buffers.pack(*arrays.values()).to(self.device)
        views = unpack(memory, *arrays.values())
        return PromptInputs(memory=memory, **dict(zip(arrays, views, strict=True)))

    def write_prompt_inputs(self, inputs: PromptInputs, step: PromptStep) -> None:
        """Bring the inputs up to date with a step, by one copy.   writes: inputs"""
        arrays = _pad_prompt(
            (step.row_ids, step.starts, step.stops),
            len(inputs.row_ids),
            len(inputs.token_rows),
            self.padding_row,
        )
        # Packed in fresh memory each time: the copy runs later than this call, and a buffer of our
        # own would be overwritten by the next step.
        inputs.memory.copy_(self.buffers.pack(*arrays.values()), non_blocking=True)

    def prompt_batch(self, inputs: PromptInputs) -> Batch:
        """Make the batch of the inputs, padding included, every token of it scored."""
        return make_batch(
            self.buffers,
            row_ids=inputs.row_ids,
            starts=inputs.starts,
            query_start=inputs.query_start,
            token_rows=inputs.token_rows,
            positions=inputs.positions,
            max_query_len=len(inputs.token_rows),
            logit_indices=None,
            sampling=Sampling(),
            by_numpy=False,
        )

    def prompt_attention_step(self, inputs: PromptInputs, max_seq_len: int) -> AttentionStep:
        """Make the attention step of the inputs' rows, its host lengths upper bounds."""
        lens = np.full(len(inputs.row_ids), len(inputs.token_rows), np.int32)
        return make_attention_step(
            self.buffers,
            Phase.EXTEND,
            row_ids=inputs.row_ids,
            query_start=inputs.query_start,
            context_lens=inputs.context_lens,
            host_query_lens=lens,
            host_context_lens=np.full_like(lens, max_seq_len),
            by_numpy=False,
        )


def flatten_tokens(rows: Ints, starts: Ints, counts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Compute the row and the position of each token of some rows.

    rows, starts: [rows] int64    counts: [rows] tokens of each    ends: [rows] their sums
    returns: [tokens] int64, twice
    """
    return np.repeat(rows, counts), np.arange(ends[-1]) + np.repeat(
        starts - (ends - counts), counts
    )


def _pad_prompt(
    rows: tuple[Ints, Ints, Ints], num_rows: int, num_tokens: int, padding_row: int
) -> dict[str, Ints]:
    """Pad a step's rows and tokens to so many of each.

    rows: row ids, starts and stops, each [n] int64
    returns: the arrays of `PromptInputs`
    """
    row_ids, starts, stops = rows
    counts = stops - starts
    ends = counts.cumsum()
    token_rows, positions = flatten_tokens(row_ids, starts, counts, ends)
    query_start = np.concatenate(([0], ends))
    return {
        "row_ids": _pad(row_ids, num_rows, padding_row),
        "starts": _pad(starts, num_rows, 0),
        "query_start": _pad(query_start, num_rows + 1, ends[-1]).astype(np.int32),
        "context_lens": _pad(stops, num_rows, 1).astype(np.int32),
        "token_rows": _pad(token_rows, num_tokens, padding_row),
        "positions": _pad(positions, num_tokens, 0),
    }


def _pad(values: Ints, size: int, filler: int) -> Ints:
    """Fill the values up to `size`.   returns: [size] int64"""
    padded = np.full(size, filler, np.int64)
    padded[: len(values)] = values
    return padded
