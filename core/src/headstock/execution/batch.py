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
class Step:
    """A plan's tensors: the batch, what attention is told of its decode rows and of the others, and
    where logits come from.

    logit_rows, logit_positions: [n] int64 numpy, the row and token position of each logit
    last_logits: [rows of the plan] int64 numpy, each row's last logit
    """

    batch: Batch
    decode: AttentionStep | None
    extend: AttentionStep | None
    logit_rows: Ints
    logit_positions: Ints
    last_logits: Ints


def make_step(plan: Plan, buffers: Buffers, sampling: SamplingTable) -> Step:
    """The tensors of a plan whose news the buffers have taken in."""
    counts = plan.stops - plan.starts
    ends = np.cumsum(counts)
    token_rows, positions = _flat_tokens(plan, counts, ends)
    logits, logit_ends = _logit_indices(plan, ends)
    at_rows, at_positions = buffers.as_native(token_rows), buffers.as_native(positions)
    logit_rows, logit_positions = token_rows[logits], positions[logits]
    batch = Batch(
        tokens=buffers.to_device(buffers.as_native(buffers.tokens)[at_rows, at_positions]),
        positions=buffers.to_device(at_positions),
        slots=_slot_indices(buffers, at_rows, at_positions),
        pools=buffers.pools,
        token_rows=buffers.to_device(at_rows),
        logit_indices=None if len(logits) == len(token_rows) else buffers.to_device(logits),
        sampling=sampling.make_sampling(logit_rows, logit_positions, buffers),
    )
    decode, extend = _make_attention_steps(plan, buffers)
    return Step(
        batch=batch,
        decode=decode,
        extend=extend,
        logit_rows=logit_rows,
        logit_positions=logit_positions,
        last_logits=logit_ends - 1,
    )


def make_decode_step(plan: Plan, sampling: SamplingTable, buffers: Buffers) -> DecodeStep | None:
    """The plan as a step of decode rows that each get a token; None when it is more than that."""
    count = len(plan.rows)
    if (
        plan.num_decode < count
        or int(plan.num_logits.sum()) != count
        or int(plan.samples.sum()) != count
    ):
        return None
    rows, positions = plan.rows.astype(np.int64), plan.starts.astype(np.int64)
    return DecodeStep(
        row_ids=rows,
        positions=positions,
        kind=sampling.select_kind(rows, positions, buffers),
        sampling=lambda: sampling.make_sampling(rows, positions, buffers),
    )


PlanAttention = Callable[[AttentionStep | None, AttentionStep | None], AttendInto]
"""Plans attention over a step's decode rows and the others."""


def make_prompt_step(
    plan: Plan, sampling: SamplingTable, buffers: Buffers, plan_attention: PlanAttention
) -> PromptStep | None:
    """The plan as a step with prompt tokens, each row scored once; None when it is something
    else.
    """
    if plan.num_decode == len(plan.rows) or (plan.num_logits != 1).any():
        return None
    counts = plan.stops - plan.starts
    ends = np.cumsum(counts)
    token_rows, positions = _flat_tokens(plan, counts, ends)
    rows, last = plan.rows.astype(np.int64), plan.stops.astype(np.int64) - 1
    return PromptStep(
        num_decode=plan.num_decode,
        token_rows=token_rows,
        positions=positions,
        last_tokens=ends.astype(np.int64) - 1,
        is_sampled=plan.samples > 0,
        kind=sampling.select_kind(rows, last, buffers),
        sampling=lambda: sampling.make_sampling(rows, last, buffers),
        attention=lambda: plan_attention(*_make_attention_steps(plan, buffers)),
    )


def _flat_tokens(plan: Plan, counts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """The row and the position of each token of the batch.

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
    """What attention is told of the plan's decode rows, and of the others; None where there are
    none.
    """
    split = plan.num_decode
    decode = _make_attention_step(plan, buffers, slice(0, split), Phase.DECODE) if split else None
    extend = (
        _make_attention_step(plan, buffers, slice(split, None), None)
        if split < len(plan.rows)
        else None
    )
    return decode, extend


def _logit_indices(plan: Plan, ends: Ints) -> tuple[Ints, Ints]:
    """Which tokens of the batch are scored, and where each row's logits end among them.

    ends: [rows] where its tokens end
    """
    wanted = plan.num_logits.astype(np.int64)
    logit_ends = np.cumsum(wanted)
    if (wanted == 1).all():
        return ends.astype(np.int64) - 1, logit_ends
    within = np.arange(logit_ends[-1]) - np.repeat(logit_ends - wanted, wanted)
    return np.repeat(ends - wanted, wanted) + within, logit_ends


def _slot_indices(buffers: Buffers, rows: Any, positions: Any) -> tuple[Tensor, ...]:
    """Where each token's keys and values go, by group.   returns: [tokens] int64

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
    """What a backend is told of some of the plan's rows."""
    starts, stops = plan.starts[part], plan.stops[part]
    if phase is None:
        phase = Phase.EXTEND if starts.any() else Phase.PREFILL
    lens = stops - starts
    query_start = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, out=query_start[1:])
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
