"""Graphs of steps whose rows verify drafts: some tokens of each row, all of them scored."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headstock.spi import AttentionBackend, DecodeStep, Program
from headstock_cuda_graph.uploads import upload

VERIFY_TOKENS = 128
"""The most tokens of such a graph.

Up to here a step takes hardly longer than one of a single token, so that padding costs little.
Steps with more tokens are replayed in pieces, which take any mix of rows.
"""


def verify_rows(buckets: tuple[int, ...], verify_len: int) -> tuple[int, ...]:
    """Those of the row counts for which graphs of rows that verify drafts are captured."""
    if verify_len == 1:
        return ()
    return tuple(rows for rows in buckets if rows * verify_len <= VERIFY_TOKENS)


def forward_verification(
    program: Program, backend: AttentionBackend, lines: Tensor, verify_len: int
) -> Tensor:
    """The hidden states of rows that verify drafts. [rows * verify_len, hidden]

    lines: [2, rows * verify_len] int64, the row and the position of each token, row by row
    writes: the pools
    """
    tables, layers = program.row_tables, program.attention.layers
    rows, starts = lines[:, ::verify_len].contiguous()
    longest = np.full(len(rows), program.attention.max_seq_len, np.int32)
    plan = backend.capture_plan(tables.attention_step(rows, starts, verify_len, longest))

    def attend(q: Tensor, index: int) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        backend.forward(q, layers[index], plan, out)
        return out

    batch = tables.batch(rows, starts, verify_len)
    return program.model.forward(program.params, program.config, batch, attend, program.ops)


def write_verification(lines: Tensor, step: DecodeStep, padding_row: int) -> None:
    """Bring the inputs of a graph up to date with a step, by one copy; the rest is padding.

    lines: [2, tokens] int64, as `forward_verification` takes it
    writes: lines
    """
    size, length = lines.shape[1], step.query_len
    positions = (step.starts[:, None] + np.arange(length)).ravel()
    upload(lines.view(-1), (step.row_ids.repeat(length), size, padding_row), (positions, size, 0))
