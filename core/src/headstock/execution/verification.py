"""Steps in which rows verify drafts: which positions are sampled, and where samples go."""

from __future__ import annotations

import numpy as np

from headstock.execution.buffers import Buffers
from headstock.execution.row_tables import flatten_tokens
from headstock.execution.sampling_inputs import SamplingTable
from headstock.scheduler import Plan
from headstock.scheduler.row_counters import read_only
from headstock.spi import DecodeStep
from headstock.spi.arrays import Ints


def make_verify_step(
    plan: Plan, sampling: SamplingTable, buffers: Buffers, query_len: int
) -> DecodeStep | None:
    """Make the plan a decode step of `query_len` tokens a row; None where it cannot be one.

    Each row must compute one token and its drafts. Rows with fewer drafts are padded behind them.
    """
    rows = read_only(plan.rows.astype(np.int64))
    starts = read_only(plan.starts.astype(np.int64))
    counts = plan.num_drafts + 1
    if (plan.stops - plan.starts != counts).any() or (plan.num_logits != counts).any():
        return None
    # One token of a prompt that goes on: a replay would store its sample in place of the next.
    if not plan.samples.all():
        return None
    # Padding must stay within the tables: an index past their end would stop the device. What it
    # writes is a row's own: places behind its tokens, which are written anew before they are read,
    # or the dummy page where the row has no page yet.
    if int(starts.max()) + query_len > buffers.tokens.shape[1] - 1:
        return None
    scored = flatten_tokens(rows, starts, counts, np.cumsum(counts))
    padded_rows = rows.repeat(query_len)
    padded = (starts[:, None] + np.arange(query_len)).ravel()
    return DecodeStep(
        row_ids=rows,
        starts=starts,
        query_len=query_len,
        kind=sampling.select_kind(*scored, buffers, find_verified(plan, query_len)),
        sampling=lambda: sampling.make_sampling(padded_rows, padded, buffers),
        prepare_sampling=lambda: sampling.masks.write(buffers),
    )


def find_verified(plan: Plan, query_len: int) -> Ints | None:
    """Find the plan's logits among `query_len` positions a row; None when they are all of them.

    returns: [logits] int64
    """
    counts = plan.num_logits.astype(np.int64)
    if (counts == query_len).all():
        return None
    _, at = flatten_tokens(counts, np.arange(len(counts)) * query_len, counts, np.cumsum(counts))
    return at


def list_stored_samples(plan: Plan) -> tuple[Ints, Ints, Ints]:
    """List the samples that go to the token table: rows, positions, and where among the logits.

    A row that verifies drafts stores one at each of them: what the host rejects is written anew
    before it is read.
    returns: [n] int64 each
    """
    which = plan.samples > 0
    counts = (plan.num_drafts + 1)[which].astype(np.int64)
    ends = np.cumsum(counts)
    rows, positions = flatten_tokens(
        plan.rows[which].astype(np.int64),
        plan.stops[which].astype(np.int64) + 1 - counts,
        counts,
        ends,
    )
    _, at = flatten_tokens(counts, plan.last_logits[which] + 1 - counts, counts, ends)
    return rows, positions, at
