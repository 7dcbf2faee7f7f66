"""Drafts that the model's own layers make behind a step, before the host knows its tokens."""

from __future__ import annotations

import numpy as np
import torch
from attrs import evolve
from torch import Tensor

from headstock.nn.planned_attention import bind_plan
from headstock.spi import Attend, AttentionBackend, Batch, Program, StepInputs
from headstock.spi.arrays import Ints


def make_drafts(
    program: Program,
    batch: Batch,
    attend: Attend,
    hidden: Tensor,
    stops: Ints,
    row_ids: Tensor | Ints,
) -> Tensor:
    """What the model's own layers guess to follow each row, behind its last right token.

    The step's samples are in the token table already. A draft that the step verified is right
    where it is the sample before it; a row goes on behind the first sample that no draft equals.

    batch: as it was before the samples were stored    attend: of the step
    hidden: [tokens, hidden], what `Model.forward` gave
    stops: [rows], where each row's positions in the step end, on the host
    row_ids: [rows] int64, the padding row for those that no token follows
    returns: [rows, k] int64; undefined for rows that no token follows
    writes: what the layers keep, the token table
    """
    follower = program.row_tables.read_tokens(batch.token_rows, batch.positions + 1)
    last = find_last_right(batch, follower)
    own = evolve(batch, tokens=follower)
    drafts = propose_drafts(program, own, attend, hidden, last, stops)
    # Written here and not by the host, which plans the next step meanwhile.
    program.row_tables.keep_drafts(row_ids, batch.positions[last] + 2, drafts)
    return drafts


def propose_drafts(
    program: Program, batch: Batch, attend: Attend, hidden: Tensor, last: Tensor, stops: Ints
) -> Tensor:
    """What the model's own layers guess to follow each row, as `make_drafts` says.

    batch: its tokens are those that follow each token of the step
    last: [rows] int64, the last right token of each row, by its index
    returns: [rows, k] int64    writes: what the layers keep
    """
    tables = program.row_tables
    hidden = _run_layers(program, hidden, batch, attend)
    hidden, starts = hidden[last], batch.positions[last]
    drafts = [_choose_tokens(program, hidden)]
    while len(drafts) < program.verify_len - 1:
        # The last positions may lie past a row's pages. What is there is the dummy page's, so that
        # such a draft is a worse guess.
        starts = (starts + 1).clamp_(max=program.attention.max_seq_len - 1)
        inputs = StepInputs.of_rows(batch.row_ids, starts, 1)
        one_each = evolve(tables.batch(inputs), tokens=drafts[-1])
        bounds = np.minimum(stops + len(drafts), program.attention.max_seq_len)
        attend = _plan_attention(program, inputs, bounds.astype(np.int32))
        hidden = _run_layers(program, hidden, one_each, attend)
        drafts.append(_choose_tokens(program, hidden))
    return torch.stack(drafts, 1)


def make_row_drafts(
    program: Program,
    backend: AttentionBackend,
    lines: Tensor,
    tokens: Tensor,
    hidden: Tensor,
    query_len: int,
) -> Tensor:
    """`make_drafts` behind rows of one length, in what a graph may capture.

    backend: attends for rows of that length, planned from upper bounds
    lines: [2, rows * query_len] int64, the row and the position of each token, row by row
    tokens: [rows * query_len] int64, as they were before the samples were stored
    """
    tables, attention = program.row_tables, program.attention
    row_ids, starts = lines[:, ::query_len].contiguous()
    rows = StepInputs.of_rows(row_ids, starts, query_len)
    longest = np.full(len(row_ids), attention.max_seq_len, np.int32)
    plan = backend.capture_plan(tables.attention_step(rows, longest))
    attend = bind_plan(program, backend, plan)
    batch = evolve(tables.batch(rows), tokens=tokens)
    return make_drafts(program, batch, attend, hidden, longest, row_ids)


def find_last_right(batch: Batch, follower: Tensor) -> Tensor:
    """The last token of each row that its sequence goes on with, by its index.

    follower: [tokens] int64, what follows each token; drafts that were wrong differ from it
    returns: [rows] int64
    """
    firsts, ends = batch.query_start[:-1].long(), batch.query_start[1:].long()
    is_wrong = torch.ones_like(follower, dtype=torch.bool)
    torch.ne(batch.tokens[1:], follower[:-1], out=is_wrong[1:])
    # Not by an index: on a GPU, a capture cannot copy the number that would be stored.
    is_wrong.index_fill_(0, firsts.clamp(max=len(is_wrong) - 1), False)
    # The count grows at each wrong one, so a row's first stretch ends where it does.
    count = is_wrong.cumsum(0)
    behind = torch.searchsorted(count, count[firsts.clamp(max=len(count) - 1)], right=True)
    return (torch.minimum(behind, ends) - 1).clamp_(min=0)


def _run_layers(program: Program, hidden: Tensor, batch: Batch, attend: Attend) -> Tensor:
    """What `Model.draft` makes of the batch. [tokens, hidden]   writes: what its layers keep"""
    assert program.model.draft is not None, "has_own_drafts was claimed"
    return program.model.draft(program.params, program.config, hidden, batch, attend, program.ops)


def _choose_tokens(program: Program, hidden: Tensor) -> Tensor:
    """The likeliest token for each of `hidden` [rows, hidden].   returns: [rows] int64"""
    if program.model.logits is None:
        return program.ops.lm_head(hidden).argmax(-1)
    return program.model.logits(program.params, program.config, hidden, program.ops).argmax(-1)


def _plan_attention(program: Program, inputs: StepInputs, bounds: Ints) -> Attend:
    """Plan attention of one token a row.

    bounds: [rows] int32, the most that each context may have
    """
    attention = program.attention
    if attention.takes_bounds:
        step = program.row_tables.attention_step(inputs, bounds)
        return bind_plan(program, attention.backend, attention.backend.capture_plan(step))
    # How many drafts were right is known on the device alone, and the backend plans on the host.
    lens = (inputs.starts + 1).to(torch.int32).cpu().numpy()
    step = program.row_tables.attention_step(inputs, lens)
    return bind_plan(program, attention.backend, attention.backend.plan(step))
