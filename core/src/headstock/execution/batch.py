"""From a plan to tensors, without a loop over tokens or rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from attrs import frozen
from torch import Tensor

from headstock.execution.buffers import Buffers
from headstock.execution.prefix_step import share_prefixes
from headstock.execution.row_tables import flatten_tokens, make_attention_step, make_batch
from headstock.execution.sampling_inputs import SamplingTable
from headstock.scheduler import Plan
from headstock.scheduler.row_counters import read_only
from headstock.spi import (
    AttendInto,
    AttentionStep,
    Batch,
    DecodeStep,
    Phase,
    Pooling,
    PrefixGroups,
    PromptStep,
)
from headstock.spi.arrays import Ints


@frozen(kw_only=True, eq=False)
class StepTensors:
    """A plan's tensors: the batch, and the attention steps of its decode rows and of the others."""

    batch: Batch
    decode: AttentionStep | None
    extend: AttentionStep | None


def make_step(
    plan: Plan,
    buffers: Buffers,
    sampling: SamplingTable,
    groups: PrefixGroups | None = None,
    pooling: Pooling | None = None,
) -> StepTensors:
    """Make the tensors of a plan that `buffers` have applied.

    groups: of a plan whose rows all decode; beside prompts each row is read by itself
    pooling: of the plan's rows that pool
    """
    counts = plan.stops - plan.starts
    ends = np.cumsum(counts)
    rows, starts = plan.rows.astype(np.int64), plan.starts.astype(np.int64)
    is_decode = plan.num_decode == len(rows)
    tokens = (rows, starts) if is_decode else flatten_tokens(rows, starts, counts, ends)
    logits = _find_logit_indices(plan, ends)
    is_all_scored = len(logits) == len(tokens[0])
    step_rows, (first, *more) = _upload_rows(
        plan,
        buffers,
        slice(None),
        starts,
        # A step of decode rows has their tokens in its rows already.
        *(() if is_decode else tokens),
        *(() if is_all_scored else (logits,)),
    )
    batch = make_batch(
        buffers,
        row_ids=step_rows.row_ids,
        starts=first,
        query_start=step_rows.query_start,
        token_rows=step_rows.row_ids if is_decode else more[0],
        positions=first if is_decode else more[1],
        max_query_len=int(counts.max()),
        logit_indices=None if is_all_scored else more[-1],
        sampling=sampling.make_sampling(tokens[0][logits], tokens[1][logits], buffers),
        columns=sampling.processors.row_columns,
        pooling=pooling,
        by_numpy=buffers.device.type == "cpu",
    )
    decode, extend = _make_attention_steps(plan, buffers, step_rows, groups)
    return StepTensors(batch=batch, decode=decode, extend=extend)


def make_decode_step(
    plan: Plan, sampling: SamplingTable, buffers: Buffers, groups: PrefixGroups | None = None
) -> DecodeStep | None:
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
    rows = read_only(plan.rows.astype(np.int64))
    positions = read_only(plan.starts.astype(np.int64))
    return DecodeStep(
        row_ids=rows,
        starts=positions,
        query_len=1,
        # `sampling` is a function: the kinds that graphs cover read the columns on the device, and
        # tensors made for them here would be thrown away.
        kind=sampling.select_kind(rows, positions, buffers),
        sampling=lambda: sampling.make_sampling(rows, positions, buffers),
        groups=groups,
        prepare_sampling=lambda: sampling.masks.write(buffers),
    )


PlanAttention = Callable[[AttentionStep | None, AttentionStep | None], AttendInto]
"""Plans attention for the attention steps of decode rows and of the others."""


def make_prompt_step(
    plan: Plan,
    sampling: SamplingTable,
    buffers: Buffers,
    plan_attention: PlanAttention,
    groups: PrefixGroups | None = None,
) -> PromptStep | None:
    """Make the plan a prompt step.

    groups: of its first rows, which decode
    returns: None if all rows decode, or a row is scored more than once though it has no drafts
    """
    most = plan.num_drafts + 1 if len(plan.num_drafts) else 1
    if plan.num_decode == len(plan.rows) or (plan.num_logits != most).any():
        return None
    rows, starts, stops = (
        read_only(array.astype(np.int64)) for array in (plan.rows, plan.starts, plan.stops)
    )
    logit_rows, scored = rows, stops - 1
    if len(plan.num_drafts):
        logit_rows, scored = flatten_tokens(
            rows, stops - plan.num_logits, plan.num_logits, np.cumsum(plan.num_logits)
        )
    return PromptStep(
        num_decode=plan.num_decode,
        row_ids=rows,
        starts=starts,
        stops=stops,
        is_sampled=read_only(plan.samples > 0),
        num_logits=read_only(plan.num_logits.view()) if len(plan.num_drafts) else None,
        kind=sampling.select_kind(logit_rows, scored, buffers),
        sampling=lambda: sampling.make_sampling(logit_rows, scored, buffers),
        prepare_sampling=lambda: sampling.masks.write(buffers),
        groups=groups,
        # A function, because the runner may launch work before the host plans attention; a whole
        # graph needs no such plan at all.
        attention=lambda: plan_attention(*_make_attention_steps(plan, buffers)),
    )


@frozen(eq=False)
class UploadedRows:
    """Rows of a plan, on the device.

    row_ids: [rows] int64    query_start: [rows + 1] int32    context_lens: [rows] int32
    """

    row_ids: Tensor
    query_start: Tensor
    context_lens: Tensor


def _upload_rows(
    plan: Plan, buffers: Buffers, part: slice, *more: Ints
) -> tuple[UploadedRows, list[Tensor]]:
    """Copy a part of the plan's rows to the device, and with them, in one transfer, `more`."""
    starts, stops = plan.starts[part], plan.stops[part]
    ends = np.zeros(len(starts) + 1, np.int32)
    np.cumsum(stops - starts, out=ends[1:])
    row_ids, query_start, lens, *others = buffers.to_device_packed(
        plan.rows[part].astype(np.int64), ends, stops, *more
    )
    return UploadedRows(row_ids, query_start, lens), others


def _make_attention_steps(
    plan: Plan,
    buffers: Buffers,
    rows: UploadedRows | None = None,
    groups: PrefixGroups | None = None,
) -> tuple[AttentionStep | None, AttentionStep | None]:
    """Make the attention steps of decode rows and of the others; None where there are none.

    rows: all rows of the plan, if they are on the device    groups: where all rows decode
    """
    split = plan.num_decode
    if split == len(plan.rows):
        step = _make_attention_step(plan, buffers, slice(None), rows, Phase.DECODE)
        return share_prefixes(step, groups, buffers), None
    phase = Phase.EXTEND if plan.starts[split:].any() else Phase.PREFILL
    if not split:
        return None, _make_attention_step(plan, buffers, slice(None), rows, phase)
    decode = _make_attention_step(plan, buffers, slice(0, split), None, Phase.DECODE)
    extend = _make_attention_step(plan, buffers, slice(split, None), None, phase)
    return decode, extend


def _make_attention_step(
    plan: Plan, buffers: Buffers, part: slice, rows: UploadedRows | None, phase: Phase
) -> AttentionStep:
    """Make the attention step of a part of the plan's rows.

    rows: those rows, if they are on the device
    """
    if rows is None:
        rows, _ = _upload_rows(plan, buffers, part)
    # A view of its own, so that core's array stays writeable: torch copies others at an upload.
    stops = read_only(plan.stops[part])
    return make_attention_step(
        buffers,
        phase,
        row_ids=rows.row_ids,
        query_start=rows.query_start,
        context_lens=rows.context_lens,
        host_query_lens=read_only(stops - plan.starts[part]),
        host_context_lens=stops,
        by_numpy=buffers.device.type == "cpu",
    )


def _find_logit_indices(plan: Plan, ends: Ints) -> Ints:
    """Find the tokens of the batch that are scored: the last `num_logits` of each row.

    ends: [rows] where its tokens end
    returns: [n] int64
    """
    counts = plan.num_logits.astype(np.int64)
    # Nearly every plan: each row is scored once at least, so that NaN shows at once
    # (docs/decisions/0011-scored-chunks.md), more often only for drafts and prompt logprobs, and
    # not at all where it pools.
    if (counts == 1).all():
        return ends.astype(np.int64) - 1
    logit_ends = np.cumsum(counts)
    within = np.arange(logit_ends[-1]) - np.repeat(logit_ends - counts, counts)
    indices: Ints = np.repeat(ends - counts, counts) + within
    return indices
