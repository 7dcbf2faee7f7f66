"""From a plan to tensors, without a loop over tokens or rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from attrs import frozen
from torch import Tensor

from headstock.execution.buffers import Buffers
from headstock.execution.sampling_inputs import SamplingTable
from headstock.scheduler import Plan
from headstock.spi import AttendInto, AttentionStep, Batch, DecodeStep, Phase, PromptStep
from headstock.spi.arrays import Ints


@frozen(kw_only=True, eq=False)
class StepTensors:
    """A plan's tensors: the batch, and the attention steps of its decode rows and of the others."""

    batch: Batch
    decode: AttentionStep | None
    extend: AttentionStep | None


def make_step(plan: Plan, buffers: Buffers, sampling: SamplingTable) -> StepTensors:
    """Make the tensors of a plan that `buffers` have applied."""
    counts = plan.stops - plan.starts
    ends = np.cumsum(counts)
    token_rows, positions = _flatten_tokens(plan, counts, ends)
    logits = _find_logit_indices(plan, ends)
    at_rows, at_positions = buffers.as_native(token_rows), buffers.as_native(positions)
    batch = Batch(
        # From the device's token table: with overlap the host has not seen the newest tokens yet.
        tokens=buffers.to_device(buffers.as_native(buffers.tokens)[at_rows, at_positions]),
        positions=buffers.to_device(at_positions),
        slots=_make_slots(buffers, at_rows, at_positions),
        pools=buffers.pools,
        token_rows=buffers.to_device(at_rows),
        logit_indices=None if len(logits) == len(token_rows) else buffers.to_device(logits),
        sampling=sampling.make_sampling(token_rows[logits], positions[logits], buffers),
    )
    decode, extend = _make_attention_steps(plan, buffers)
    return StepTensors(batch=batch, decode=decode, extend=extend)


def make_decode_step(plan: Plan, sampling: SamplingTable, buffers: Buffers) -> DecodeStep | None:
    """Make the plan a decode step; None unless each row decodes and gets a token."""
    count = len(plan.rows)
    if (
        # Captured sampling scores each row once and stores every token, and no graph leaves one
        # out.
        plan.num_decode < count
        or int(plan.num_logits.sum()) != count
        or int(plan.samples.sum()) != count
    ):
        return None
    rows, positions = plan.rows.astype(np.int64), plan.starts.astype(np.int64)
    return DecodeStep(
        row_ids=rows,
        positions=positions,
        # `sampling` is a function: the kinds that graphs cover read the columns on the device, and
        # tensors made for them here would be thrown away.
        kind=sampling.select_kind(rows, positions, buffers),
        sampling=lambda: sampling.make_sampling(rows, positions, buffers),
    )


PlanAttention = Callable[[AttentionStep | None, AttentionStep | None], AttendInto]
"""Plans attention for the attention steps of decode rows and of the others."""


def make_prompt_step(
    plan: Plan, sampling: SamplingTable, buffers: Buffers, plan_attention: PlanAttention
) -> PromptStep | None:
    """Make the plan a prompt step; None if all rows decode or a row is scored more than once."""
    if plan.num_decode == len(plan.rows) or (plan.num_logits != 1).any():
        return None
    counts = plan.stops - plan.starts
    ends = np.cumsum(counts)
    token_rows, positions = _flatten_tokens(plan, counts, ends)
    rows, last = plan.rows.astype(np.int64), plan.stops.astype(np.int64) - 1
    return PromptStep(
        num_decode=plan.num_decode,
        token_rows=token_rows,
        positions=positions,
        last_tokens=ends.astype(np.int64) - 1,
        is_sampled=plan.samples > 0,
        kind=sampling.select_kind(rows, last, buffers),
        sampling=lambda: sampling.make_sampling(rows, last, buffers),
        # A function, because the runner may launch work before the host plans attention; a whole
        # graph needs no such plan at all.
        attention=lambda: plan_attention(*_make_attention_steps(plan, buffers)),
    )


def _flatten_tokens(plan: Plan, counts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Compute the row and the position of each token of the batch.

    counts, ends: [rows]
    returns: [tokens] int64, twice
    """
    rows, starts = plan.rows.astype(np.int64), plan.starts.astype(np.int64)
    if plan.num_decode == len(rows):
        return rows, starts
    return np.repeat(rows, counts), np.arange(ends[-1]) + np.repeat(
        starts - (ends - counts), counts
    )


def _make_attention_steps(
    plan: Plan, buffers: Buffers
) -> tuple[AttentionStep | None, AttentionStep | None]:
    """Make the attention steps of decode rows and of the others; None where there are none."""
    split = plan.num_decode
    decode = _make_attention_step(plan, buffers, slice(0, split), Phase.DECODE) if split else None
    extend = (
        _make_attention_step(plan, buffers, slice(split, None), None)
        if split < len(plan.rows)
        else None
    )
    return decode, extend


def _find_logit_indices(plan: Plan, ends: Ints) -> Ints:
    """Find the tokens of the batch that are scored: the last `num_logits` of each row.

    ends: [rows] where its tokens end
    returns: [n] int64
    """
    counts = plan.num_logits.astype(np.int64)
    # Nearly every plan: each row is scored at least once, so that NaN shows at once
    # (docs/decisions/0011-scored-chunks.md), and more often only for drafts and prompt logprobs.
    if (counts == 1).all():
        return ends.astype(np.int64) - 1
    logit_ends = np.cumsum(counts)
    within = np.arange(logit_ends[-1]) - np.repeat(logit_ends - counts, counts)
    indices: Ints = np.repeat(ends - counts, counts) + within
    return indices


def _make_slots(buffers: Buffers, rows: Any, positions: Any) -> tuple[Tensor, ...]:
    """Look up where each token's keys and values go, by group.   returns: [tokens] int64

    rows, positions: [tokens] int64, native
    """
    size = buffers.page_size
    columns = positions // size
    offsets = positions - columns * size
    tables = map(buffers.as_native, buffers.page_tables)
    return tuple(buffers.to_device(table[rows, columns] * size + offsets) for table in tables)


def _make_attention_step(
    plan: Plan, buffers: Buffers, part: slice, phase: Phase | None
) -> AttentionStep:
    """Make the attention step of a part of the plan's rows.

    phase: None for PREFILL or EXTEND, by whether a row has earlier tokens
    """
    starts, stops = plan.starts[part], plan.stops[part]
    if phase is None:
        phase = Phase.EXTEND if starts.any() else Phase.PREFILL
    lens = stops - starts
    query_start = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, out=query_start[1:])
    # Only the columns that some row uses: tables of the longest context would be copied whole.
    columns = -(-int(stops.max()) // buffers.page_size)
    put = buffers.to_device_packed(query_start, stops, plan.rows[part].astype(np.int64))
    rows = buffers.as_native(put[2])
    tables = map(buffers.as_native, buffers.page_tables)
    return AttentionStep(
        phase=phase,
        query_start=put[0],
        context_lens=put[1],
        page_tables=tuple(buffers.to_device(table[rows, :columns]) for table in tables),
        host_query_lens=lens,
        host_context_lens=stops,
    )
