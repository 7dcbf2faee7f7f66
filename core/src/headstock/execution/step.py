"""From a plan to a step, and to its tensors without a loop over tokens or rows."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from headstock.execution.attention_router import PhaseRouter
from headstock.execution.buffers import Buffers
from headstock.execution.pooling import PoolingTable
from headstock.execution.prefix_step import share_prefixes
from headstock.execution.prefix_tracker import PrefixTracker, keep_prompts, sort_rows
from headstock.execution.row_tables import (
    look_up_draft_pages,
    make_attention_step,
    make_batch,
)
from headstock.execution.sampling_inputs import SamplingTable
from headstock.execution.step_words import flatten_tokens
from headstock.scheduler import Plan
from headstock.scheduler.row_counters import read_only
from headstock.spi import AttendInto, AttentionStep, Batch, Phase, PrefixGroups, Sampling, Step
from headstock.spi.arrays import Ints


@frozen(kw_only=True, eq=False)
class StepMaker:
    """Makes the steps of plans out of the device's tables.

    tracker: finds decode rows that share leading pages; None where none can
    """

    buffers: Buffers
    sampling: SamplingTable
    pooling: PoolingTable
    router: PhaseRouter
    tracker: PrefixTracker | None = None

    def make_step(self, plan: Plan) -> PlannedStep:
        """Make the step of a plan that the tables have applied."""
        row_ids, starts, stops = (
            plan.rows.astype(np.int64),
            plan.starts.astype(np.int64),
            plan.stops.astype(np.int64),
        )
        num_logits, is_sampled = plan.num_logits.view(), plan.samples > 0
        for array in (row_ids, starts, stops, num_logits, is_sampled):
            array.flags.writeable = False
        return PlannedStep(
            num_decode=plan.num_decode,
            row_ids=row_ids,
            starts=starts,
            stops=stops,
            num_logits=num_logits,
            num_drafts=read_only(plan.num_drafts.view()) if len(plan.num_drafts) else None,
            is_sampled=is_sampled,
            saved=list_saved(plan, len(self.buffers.page_tables)),
            plan=plan,
            maker=self,
        )


@frozen(kw_only=True, eq=False, slots=False)
class PlannedStep(Step):
    """The step of a plan."""

    plan: Plan
    maker: StepMaker

    def grouped(self) -> Step:
        """The step with `groups`, its rows group by group; itself where that is not worth it."""
        tracker, plan = self.maker.tracker, self.plan
        # Rows beside groups have one logit each.
        if tracker is None or self.num_drafts is not None or not self.is_scored_once:
            return self
        if self.groups is not None:
            return self
        grouped = tracker.group_plan(plan)
        if grouped is None:
            return self
        if grouped.is_sorted:
            return evolve(self, groups=grouped.groups)
        count = len(plan.rows)
        order, place = (keep_prompts(each, count) for each in (grouped.order, grouped.place))
        step = self.maker.make_step(sort_rows(plan, order))
        return evolve(step, groups=grouped.groups, order=place)

    def batch(self) -> Batch:
        """Make the batch of the step's tokens, its pooling included."""
        buffers, tokens, logits = self.maker.buffers, self._tokens, self._logits
        rows, (starts, *more) = self._uploaded
        is_all_scored = len(logits) == len(tokens[0])
        return make_batch(
            buffers,
            row_ids=rows.row_ids,
            starts=starts,
            query_start=rows.query_start,
            token_rows=rows.row_ids if self.is_decode else more[0],
            positions=starts if self.is_decode else more[1],
            max_query_len=int((self.stops - self.starts).max()),
            logit_indices=None if is_all_scored else more[-1],
            columns=self.maker.sampling.processors.row_columns,
            pooling=self.maker.pooling.make_pooling(self.plan, buffers),
            by_numpy=buffers.device.type == "cpu",
            saved=self._find_saved(),
        )

    def _find_saved(self) -> tuple[Tensor, tuple[Tensor | None, ...]] | None:
        """Find the tokens behind which states are saved, and their pages by group.

        Those are a verifying row's tokens, those of rows that have one token and sample, beside
        drafts, and those amid prompts.
        """
        plan, buffers, saved = self.plan, self.maker.buffers, self.saved
        if not buffers.state_pools or (saved is None and not len(plan.num_drafts)):
            return None
        counts = self.stops - self.starts
        kept = np.zeros_like(counts)
        if len(plan.num_drafts):
            # Nothing comes after the last possible draft, so that its state is the row's own.
            kept = np.minimum(plan.num_drafts + 1, buffers.num_draft_pages)
            kept = np.where((plan.num_drafts > 0) | plan.keeps_single, kept, 0)
        rows, numbers = flatten_tokens(self.row_ids, np.zeros_like(counts), kept, kept.cumsum())
        tokens = np.repeat(counts.cumsum() - counts, kept) + numbers
        if saved is None:
            saved = np.zeros((1 + len(buffers.page_tables), 0), np.int64)
        drafts, *places, amid = buffers.to_device_packed(tokens, rows, numbers, saved)
        return torch.cat((drafts, amid[0])), tuple(
            None if pages is None else torch.cat((pages, amid[1 + group]))
            for group, pages in enumerate(look_up_draft_pages(buffers, *places))
        )

    def attention(self) -> AttendInto:
        """Plan the step's attention on the host, and return the function that computes it."""
        return self.maker.router.plan(*self.make_attention_steps())

    def make_attention_steps(self) -> tuple[AttentionStep | None, AttentionStep | None]:
        """Make the attention steps of decode rows and of the others; None without such rows."""
        # What `batch` has uploaded is not uploaded again.
        rows = self._uploaded[0] if "_uploaded" in vars(self) else None
        return _make_attention_steps(self.plan, self.maker.buffers, rows, self.groups)

    def kind(self, places: Ints | None = None) -> frozenset[str] | None:
        """The settings that matter for some scored token; None when sampling needs more."""
        return self.maker.sampling.select_kind(
            self.scored_rows, self.scored_positions, self.maker.buffers, places
        )

    def prepare_sampling(self) -> None:
        """Fill the masks that are pending and write them to the device."""
        self.maker.sampling.masks.write(self.maker.buffers)

    def sampling(self, row_ids: Ints | None = None, positions: Ints | None = None) -> Sampling:
        """Make the complete settings, for any kind."""
        rows = self.scored_rows if row_ids is None else row_ids
        at = self.scored_positions if positions is None else positions
        return self.maker.sampling.make_sampling(rows, at, self.maker.buffers)

    @cached_property
    def _tokens(self) -> tuple[Ints, Ints]:
        """The row and the position of each token, [tokens] int64 each."""
        if self.is_decode:
            return self.row_ids, self.starts
        counts = self.stops - self.starts
        return flatten_tokens(self.row_ids, self.starts, counts, counts.cumsum())

    @cached_property
    def _logits(self) -> Ints:
        """The index of each scored token, [logits] int64."""
        return self.scored_tokens

    @cached_property
    def _uploaded(self) -> tuple[UploadedRows, list[Tensor]]:
        """The rows on the device, and by the same transfer where they start, their tokens, if not
        each has one, and which of these are scored, if not all are.
        """
        logits = self._logits
        return _upload_rows(
            self.plan,
            self.maker.buffers,
            slice(None),
            self.starts,
            # A step of decode rows has their tokens in its rows already.
            *(() if self.is_decode else self._tokens),
            *(() if len(logits) == len(self._tokens[0]) else (logits,)),
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


def list_saved(plan: Plan, num_groups: int) -> Ints | None:
    """List the states amid prompts that a plan saves, as `Step.saved`; None for none."""
    if not len(plan.saves):
        return None
    counts = (plan.stops - plan.starts).astype(np.int64)
    firsts = counts.cumsum() - counts - plan.starts
    places = {row: at for at, row in enumerate(plan.rows.tolist())}
    groups = np.unique(plan.saves[:, 0]).tolist()
    # A state has a page in each group that keeps one, and they come in one order.
    first = plan.saves[plan.saves[:, 0] == groups[0]]
    at = np.array([places[row] for row in first[:, 1].tolist()])
    saved = np.zeros((1 + num_groups, len(first)), np.int64)
    saved[0] = firsts[at] + first[:, 2] - 1
    for group in groups:
        saved[1 + group] = plan.saves[plan.saves[:, 0] == group, 3]
    return read_only(saved)


def _make_attention_steps(
    plan: Plan,
    buffers: Buffers,
    rows: UploadedRows | None = None,
    groups: PrefixGroups | None = None,
) -> tuple[AttentionStep | None, AttentionStep | None]:
    """Make the attention steps of decode rows and of the others; None without such rows.

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
    # A separate view, so that core's array stays writeable: torch copies others at an upload.
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
