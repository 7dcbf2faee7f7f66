"""Batches and attention steps out of the device's tables, for steps with and without graphs.

Core constructs these records here and nowhere else.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from headstock.execution.buffers import Buffers, unpack
from headstock.execution.prefix_step import bound_prefixes, pad_groups, split_step
from headstock.execution.step_words import count_words, split_words, write_rows
from headstock.spi import (
    AttentionStep,
    Batch,
    Phase,
    Pooling,
    PrefixGroups,
    PrefixInputs,
    RowColumns,
    RowTables,
    Sample,
    Sampling,
    Step,
    StepInputs,
)
from headstock.spi.arrays import Ints
from headstock.spi.step import MOST_SAVED

if TYPE_CHECKING:
    from headstock.execution.sampling_inputs import SamplingTable


_NO_GROUPS = PrefixGroups(counts=np.zeros(0, np.int32), lens=np.zeros(0, np.int32))


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
    columns: RowColumns,
    by_numpy: bool,
    pooling: Pooling | None = None,
    saved: tuple[Tensor, tuple[Tensor | None, ...]] | None = None,
) -> Batch:
    """Make the batch of these rows and tokens; what the arguments leave out is looked up.

    saved: tokens behind which states go to pages of their own, and by group these pages
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
        state_pages=look_up_state_pages(buffers, row_ids),
        saved_tokens=None if saved is None else saved[0],
        saved_pages=() if saved is None else saved[1],
        kv=buffers.kv,
        pools=buffers.pools,
        logit_indices=logit_indices,
        pooling=pooling,
        columns=columns,
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
    states = buffers.state_pools
    slots = (
        table[token_rows, 0].long()
        if group in states
        else offsets.add(table[token_rows, columns], alpha=size)
        for group, table in enumerate(buffers.page_tables)
    )
    return buffers.tokens[token_rows, positions], tuple(slots)


def look_up_arrays(
    buffers: Buffers, token_rows: Tensor, positions: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Do as `look_up_tensors` by numpy, which indexes small arrays in 1.6 us, torch in 2.8."""
    size, rows, at = buffers.page_size, token_rows.numpy(), positions.numpy()
    columns = at // size
    offsets = at - columns * size
    states = buffers.state_pools
    slots = (
        torch.from_numpy(
            table.numpy()[rows, 0].astype(np.int64)
            if group in states
            else table.numpy()[rows, columns] * size + offsets
        )
        for group, table in enumerate(buffers.page_tables)
    )
    return torch.from_numpy(buffers.tokens.numpy()[rows, at]), tuple(slots)


def look_up_state_pages(buffers: Buffers, row_ids: Tensor) -> tuple[Tensor | None, ...]:
    """Look up the page with each row's state, by group; None for groups without one.

    row_ids, each result: [n] int64
    """
    states = buffers.state_pools
    if not states:
        return (None,) * len(buffers.page_tables)
    return tuple(
        table[row_ids, 0].long() if group in states else None
        for group, table in enumerate(buffers.page_tables)
    )


def look_up_draft_pages(
    buffers: Buffers, rows: Tensor, numbers: Tensor
) -> tuple[Tensor | None, ...]:
    """Look up the pages for states behind drafts, by group; None for groups without a state.

    rows, numbers, each result: [m] int64, a row, and which token of its step it is
    """
    return tuple(
        table[rows, 1 + numbers].long() if group in buffers.state_pools else None
        for group, table in enumerate(buffers.page_tables)
    )


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

    Attention reads the tables of groups that keep tokens; those of states are left out.

    row_ids: [rows] int64
    by_numpy: as in `make_batch`
    """
    # Only the columns that some row uses: tables of the longest context would be copied whole. From
    # the host's lengths: those on the device would have to be waited for, and a capture cannot read
    # them.
    columns = -(-int(host_context_lens.max()) // buffers.page_size)
    tables = buffers.attention_tables
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

    def __init__(self, buffers: Buffers, sampling: SamplingTable) -> None:
        self.buffers = buffers
        self.sampling_table = sampling
        # 0, 1, 2, ..., made once: a graph would else make it in every replay.
        self.counts = torch.arange(
            len(buffers.tokens) + 1, dtype=torch.int32, device=buffers.device
        )

    @property
    def device(self) -> torch.device:
        """Where the tables lie."""
        return self.buffers.device

    @property
    def padding_row(self) -> int:
        """The last row of the tables."""
        return len(self.buffers.tokens) - 1

    def batch(self, inputs: StepInputs) -> Batch:
        """Make the batch of the inputs, padding included, every token of it scored."""
        token_rows, positions, length = inputs.token_rows, inputs.positions, inputs.query_len
        if token_rows is None or positions is None:
            token_rows, positions = inputs.row_ids, inputs.starts
            if length > 1:
                token_rows = token_rows.repeat_interleave(length)
                positions = (positions[:, None] + self._count_from_zero(length)).flatten()
        return make_batch(
            self.buffers,
            row_ids=inputs.row_ids,
            starts=inputs.starts,
            query_start=self._query_start(inputs),
            token_rows=token_rows,
            positions=positions,
            max_query_len=length or len(token_rows),
            logit_indices=None,
            columns=self.sampling_table.processors.row_columns,
            by_numpy=False,
            saved=self._find_saved(inputs),
        )

    def _find_saved(self, inputs: StepInputs) -> tuple[Tensor, tuple[Tensor | None, ...]] | None:
        """Find the tokens behind which states are saved, and their pages by group."""
        buffers, length = self.buffers, inputs.query_len
        if inputs.saved is not None:
            tokens, *pages = inputs.saved
            return tokens, tuple(
                each if group in buffers.state_pools else None for group, each in enumerate(pages)
            )
        if length < 2 or not buffers.num_draft_pages:
            return None
        # None of them behind the last token of equally long rows: the row's own page is there.
        numbers = self._count_from_zero(length)[:-1].long().repeat(len(inputs.row_ids))
        firsts = self._query_start(inputs)[:-1].long().repeat_interleave(length - 1)
        rows = inputs.row_ids.repeat_interleave(length - 1)
        return firsts + numbers, look_up_draft_pages(buffers, rows, numbers)

    def read_tokens(self, token_rows: Tensor, positions: Tensor) -> Tensor:
        """Read the tokens at these positions of rows."""
        return self.buffers.tokens[token_rows, positions]

    def keep_drafts(self, row_ids: Tensor | Ints, positions: Tensor, drafts: Tensor) -> None:
        """Write drafts to the token table, those past its end to the padding row.

        writes: the token table
        """
        table, rows = self.buffers.tokens, self.buffers.to_device(row_ids)
        places = positions[:, None] + torch.arange(drafts.shape[1], device=drafts.device)
        last = table.shape[1] - 1
        rows = rows[:, None].expand_as(places).masked_fill(places > last, self.padding_row)
        table[rows, places.clamp_(max=last)] = drafts

    def attention_step(
        self, inputs: StepInputs, host_lens: np.ndarray, prefixes: PrefixInputs | None = None
    ) -> AttentionStep:
        """Make the attention step of the inputs' rows."""
        lens, most = inputs.context_lens, inputs.query_len
        if lens is None:
            # Cast and addition in one operation.
            out = torch.empty_like(inputs.starts, dtype=torch.int32)
            lens = torch.add(inputs.starts, most, out=out)
        if inputs.token_rows is not None:
            most = len(inputs.token_rows)
        step = make_attention_step(
            self.buffers,
            Phase.DECODE if inputs.query_len == 1 else Phase.EXTEND,
            row_ids=inputs.row_ids,
            query_start=self._query_start(inputs),
            context_lens=lens,
            host_query_lens=np.full_like(host_lens, most),
            host_context_lens=host_lens,
            by_numpy=False,
        )
        return self._split_step(step, prefixes)

    def _split_step(self, step: AttentionStep, prefixes: PrefixInputs | None) -> AttentionStep:
        """Return the step, cut in two if its rows have prefixes."""
        if prefixes is None:
            return step
        starts, lens = prefixes.group_starts, prefixes.shared_lens
        bounds = bound_prefixes(step.num_rows, len(starts) - 1, step.max_context_len)
        return split_step(step, starts, lens, bounds, self.buffers.page_size)

    def prefix_inputs(self, num_rows: int) -> PrefixInputs:
        """Allocate the inputs of steps of at most `num_rows` rows, without groups."""
        arrays = pad_groups(_NO_GROUPS, num_rows)
        memory = self.buffers.pack(*arrays).to(self.device)
        group_starts, shared_lens = unpack(memory, *arrays)
        return PrefixInputs(memory=memory, group_starts=group_starts, shared_lens=shared_lens)

    def write(self, inputs: StepInputs | PrefixInputs, step: Step) -> None:
        """Bring the inputs up to date with a step or with its groups, by one copy.

        writes: inputs
        """
        memory = inputs.memory
        if memory is None:
            raise TypeError("inputs of equally long rows lie in tensors of the runner's")
        if isinstance(inputs, PrefixInputs):
            arrays = pad_groups(step.groups or _NO_GROUPS, len(inputs.shared_lens))
            memory.copy_(self.buffers.pack(*arrays), non_blocking=True)
            return
        assert inputs.token_rows is not None
        # Fresh memory each time: the copy runs later than this call, and torch hands pinned memory
        # out again only when its copy is over. The next step would overwrite a buffer of our own.
        host = torch.empty(memory.shape, dtype=torch.int64, pin_memory=memory.is_cuda)
        rows = step.row_ids, step.starts, step.stops
        num_rows, num_tokens = len(inputs.row_ids), len(inputs.token_rows)
        write_rows(host.numpy(), rows, num_rows, num_tokens, self.padding_row)
        if inputs.saved is not None:
            saved = host.numpy()[-inputs.saved.numel() :].reshape(inputs.saved.shape)
            saved[:] = 0
            if step.saved is not None:
                saved[:, : step.saved.shape[1]] = step.saved
        memory.copy_(host, non_blocking=True)

    def _query_start(self, inputs: StepInputs) -> Tensor:
        """Where the tokens of each row begin, and where the last row's end. [rows + 1] int32"""
        if inputs.query_start is not None:
            return inputs.query_start
        num_rows, query_len = len(inputs.row_ids), inputs.query_len
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
        return self.sampling_table.gather(row_ids, positions, kind)

    def keep(
        self,
        row_ids: Tensor | Ints,
        positions: Tensor | Ints,
        sample: Sample,
        scored: Ints | None = None,
    ) -> None:
        """Write sampled tokens to the token table.   writes: the token table"""
        buffers, tokens = self.buffers, sample.tokens
        if isinstance(row_ids, Tensor) or isinstance(positions, Tensor):
            buffers.tokens[row_ids, positions] = tokens if scored is None else tokens[scored]
            return
        # All are, unless a prompt goes on or is scored at several tokens.
        if scored is None or len(scored) == len(tokens):
            buffers.store_tokens(row_ids, positions, tokens)
        else:
            buffers.store_tokens(row_ids, positions, tokens[buffers.to_device(scored)])

    def step_inputs(self, num_rows: int, num_tokens: int) -> StepInputs:
        """Allocate the inputs of steps of at most this size; all of them is padding."""
        shape = (1 + len(self.buffers.page_tables), MOST_SAVED)
        num_saved = math.prod(shape) if self.buffers.state_pools else 0
        num_words = count_words(num_rows, num_tokens)
        host = torch.zeros(num_words + num_saved, dtype=torch.int64)
        # One token of the padding row: captured work takes hidden states at the end of each row.
        nothing = np.zeros(1, np.int64)
        rows = nothing + self.padding_row, nothing, nothing + 1
        write_rows(host.numpy(), rows, num_rows, num_tokens, self.padding_row)
        memory = host.to(self.device)
        return StepInputs(
            memory=memory,
            saved=memory[num_words:].view(shape) if num_saved else None,
            **split_words(memory, torch.int32, num_rows, num_tokens),
        )
