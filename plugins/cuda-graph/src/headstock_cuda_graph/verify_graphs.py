"""Graphs of steps whose rows verify drafts: some tokens of each row, all of them scored."""

from __future__ import annotations

import numpy as np
from attrs import frozen
from torch import Tensor

from headstock.nn.planned_attention import bind_plan
from headstock.spi import AttentionBackend, LayoutKind, Program, Step, StepInputs
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
    tables = program.row_tables
    row_ids, starts = lines[:, ::verify_len].contiguous()
    rows = StepInputs.of_rows(row_ids, starts, verify_len)
    longest = np.full(len(row_ids), program.attention.max_seq_len, np.int32)
    plan = backend.capture_plan(tables.attention_step(rows, longest))
    batch, attend = tables.batch(rows), bind_plan(program, backend, plan)
    return program.model.forward(program.params, program.config, batch, attend, program.ops)


@frozen(eq=False)
class PaddedLogits:
    """The tokens of rows that verify drafts, each row padded to the same number.

    row_ids, positions: [rows * verify_len] int64, of each token, row by row
    order: [logits] int64, which of these the step's own are; None for all
    """

    row_ids: np.ndarray
    positions: np.ndarray
    order: np.ndarray | None

    @classmethod
    def of(cls, step: Step, verify_len: int) -> PaddedLogits:
        """Pad the rows of a step to this number of tokens."""
        within = np.arange(verify_len)
        is_own = within < step.num_logits[:, None]
        return cls(
            step.row_ids.repeat(verify_len),
            (step.starts[:, None] + within).ravel(),
            None if is_own.all() else is_own.ravel().nonzero()[0],
        )


def keeps_state(program: Program) -> bool:
    """Whether some layers keep a state."""
    return any(group.layout.kind is LayoutKind.STATE for group in program.config.kv_groups)


def can_pad(step: Step, program: Program) -> bool:
    """Whether each row of the step has one token and its drafts, and may be padded behind them."""
    # One token of a prompt that goes on: a replay would store its sample instead of the next.
    if not step.is_sampled.all() or (step.stops - step.starts != step.num_logits).any():
        return False
    # A state takes in what a row is padded with. Behind a row's token and its drafts there are
    # copies of it, and behind tokens of a prompt that are scored there are none.
    if keeps_state(program) and (
        step.num_drafts is None or (step.num_logits != step.num_drafts + 1).any()
    ):
        return False
    # Padding must stay within the tables: an index past their end would stop the device. What it
    # writes is a row's own: places behind its tokens, which are written anew before they are read,
    # or the dummy page where the row has no page yet.
    return int(step.starts.max()) + program.verify_len <= program.attention.max_seq_len


def write_verification(lines: Tensor, padded: PaddedLogits, padding_row: int) -> None:
    """Bring the inputs of a graph up to date with a step, by one copy; the rest is padding.

    lines: [2, tokens] int64, as `forward_verification` takes it
    writes: lines
    """
    size = lines.shape[1]
    upload(lines.view(-1), (padded.row_ids, size, padding_row), (padded.positions, size, 0))
