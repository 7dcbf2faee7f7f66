"""The runner that replays steps as CUDA graphs."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from headstock.nn.eager_step import run_eager_step, score_and_sample
from headstock.spi import (
    Attend,
    Batch,
    CaptureProgress,
    DecodeStep,
    Planning,
    PrefixGroups,
    PrefixInputs,
    Program,
    PromptStep,
    Runner,
    Sample,
    Sampling,
)
from headstock_cuda_graph.buckets import buckets, token_buckets
from headstock_cuda_graph.capture import CapturedGraph, CudaGraphCapturer, GraphCapturer
from headstock_cuda_graph.prompt_graphs import PromptGraphs
from headstock_cuda_graph.sampling_kinds import TRUNCATED, SamplingKinds
from headstock_cuda_graph.uploads import upload
from headstock_cuda_graph.verify_graphs import (
    forward_verification,
    verify_rows,
    write_verification,
)

LOG = logging.getLogger("headstock.cudagraph")

SHARED_ROWS = 8
"""The smallest bucket that has a forward pass for rows that share leading pages.

On an H200 8 rows of 2,048 shared tokens take the same either way, 16 take 21 us a layer for 29.
"""


@frozen(eq=False)
class Bucket:
    """A captured forward pass of `size` rows: its input, its attention plan and its hidden states.

    shared: the same for rows that share leading pages, with the same hidden states; None where a
        bucket has none
    lines: [3, size] int64: row ids, positions, and where the rows' hidden states are among those
        of a step with prompt tokens
    """

    size: int
    lines: Tensor
    plan: Any
    forward: CapturedGraph[Tensor]
    shared: CapturedGraph[Tensor] | None
    samplers: dict[frozenset[str], CapturedGraph[Sample]]

    @property
    def inputs(self) -> Tensor:
        """Row ids and positions. [2, size] int64"""
        return self.lines[:2]


class CudaGraphRunner(Runner):
    """Replays steps that fit in a bucket and runs all others operation by operation.

    A replayed step is two graphs: the forward pass, one a bucket, and sampling, one a bucket and
    kind. Buckets of `SHARED_ROWS` and more have another forward pass, for rows that share leading
    pages, if the backend makes use of that.

    Graphs read their inputs where these lay during the capture, so every input has an address that
    stays. One upload a step writes rows and positions, and the graph makes the rest out of
    `RowTables` on the device (docs/decisions/0015, 0016).
    """

    def __init__(self, program: Program, capturer: GraphCapturer | None = None) -> None:
        self.program = program
        self.attention = program.attention
        self.injected_capturer = capturer
        self.capturer: GraphCapturer | None = None
        self.captured: dict[int, Bucket] = {}
        self.verifying: dict[int, Bucket] = {}
        self.prompts: PromptGraphs | None = None
        self.prefixes: PrefixInputs | None = None
        self.groups: PrefixGroups | None = None
        self.kinds = SamplingKinds.list(program.rules)
        self.uncapturable: set[frozenset[str]] = set()
        self.plans_itself = self.attention.planning is Planning.NONE

    def run(self, batch: Batch, attend: Attend) -> Sample:
        """What the batch's logit positions sample.   writes: batch.pools"""
        return run_eager_step(self.program, batch, attend)

    def buckets(self, max_rows: int) -> tuple[int, ...]:
        """The batch sizes that are captured."""
        return buckets(max_rows)

    def prompt_buckets(self, max_tokens: int) -> tuple[int, ...]:
        """The token counts that are captured for steps with prompt tokens."""
        return token_buckets(max_tokens)

    def capture(
        self, buckets: Sequence[int], report: CaptureProgress, prompt_buckets: Sequence[int] = ()
    ) -> Sequence[int]:
        """Capture steps of these sizes, largest first. After an error nothing is replayed."""
        self.drop_graphs()
        if not buckets:
            return ()
        # A pool of memory ends with its last graph, so each capture begins a pool of its own.
        self.capturer = self.injected_capturer or CudaGraphCapturer()
        verified = verify_rows(tuple(buckets), self.program.verify_len)
        captures, total = count(1), len(buckets) + len(prompt_buckets) + len(verified)
        prompts = PromptGraphs(self.program, self.capturer, max(buckets))
        # Largest first: what later captures need fits in the memory that earlier ones have left.
        prompts.capture(prompt_buckets, lambda: report(next(captures), total))
        self.attention.backend.graph_init(buckets, self.attention.max_seq_len)
        lines = torch.empty(
            3 * max(buckets), dtype=torch.int64, device=self.program.row_tables.device
        )
        # Host work for each of the two parts of a step would cost more than it spares.
        if self.attention.shares_prefixes and self.plans_itself:
            self.prefixes = self.program.row_tables.prefix_inputs(max(buckets))
        captured = {}
        for size in buckets:
            captured[size] = self.capture_bucket(lines[: 3 * size].view(3, size))
            report(next(captures), total)
        verifying = {}
        for rows in verified:
            hidden = captured[buckets[0]].forward.result
            verifying[rows] = self.capture_verify_bucket(rows, hidden)
            report(next(captures), total)
        # Last, so that an error above leaves nothing to replay; ascending, as the first bucket with
        # room is taken.
        self.captured, self.prompts = dict(sorted(captured.items())), prompts
        self.verifying = dict(sorted(verifying.items()))
        return sorted(prompts.captured, reverse=True)

    def capture_bucket(self, lines: Tensor) -> Bucket:
        """A bucket whose rows are all padding, with samplers for greedy rows and for temperatures.

        lines: [3, size] int64, which the bucket keeps
        writes: lines
        """
        assert self.capturer is not None
        size, inputs = lines.shape[1], lines[:2]
        # The work runs once before its capture: padding rows write to the dummy page alone.
        lines[0], lines[1:] = self.program.row_tables.padding_row, 0
        rows, starts = inputs
        step = self.program.row_tables.attention_step(rows, starts, 1, np.ones(size, np.int32))
        plan = self.attention.backend.graph_plan(size, step)
        forward = self.capturer(lambda: self.forward(inputs, plan), warm=False)
        shared = None
        if self.prefixes is not None and size >= SHARED_ROWS:
            prefixes, hidden = self.prefixes.first_rows(size), forward.result
            shared = self.capturer(
                lambda: self.forward_shared(inputs, prefixes, hidden), warm=False
            )
        bucket = Bucket(size, lines, plan, forward, shared, {})
        # Fills the hidden states: the samplers below are run before they are captured.
        forward.replay()
        self.capture_first_samplers(bucket)
        return bucket

    def capture_verify_bucket(self, rows: int, hidden: Tensor) -> Bucket:
        """A bucket of so many rows that verify drafts, all padding; its lines are one a token.

        Where no graph may have the calls of attention in it, the bucket has samplers alone.
        hidden: [n, width], hidden states of any step
        """
        program = self.program
        assert self.capturer is not None
        backend, length = program.verify_attention, program.verify_len
        lines = torch.zeros((3, rows * length), dtype=torch.int64, device=hidden.device)
        lines[0] = program.row_tables.padding_row
        forward: CapturedGraph[Tensor] = CapturedGraph(
            lambda: None, hidden.new_zeros((rows * length, *hidden.shape[1:]))
        )
        if backend is not None:
            forward = self.capturer(
                lambda: forward_verification(program, backend, lines[:2], length), warm=False
            )
            forward.replay()
        bucket = Bucket(rows * length, lines, None, forward, None, {})
        self.capture_first_samplers(bucket)
        return bucket

    def capture_first_samplers(self, bucket: Bucket) -> None:
        """Capture the kinds of sampling that begin captured.   writes: bucket.samplers"""
        for kind in self.kinds.first:
            if kind <= TRUNCATED:
                self.capture_sampler(bucket, kind, warm=False)
            else:  # plugins take part in it, and one that fails costs no other graph
                self.try_capture_sampler(bucket, kind, warm=False)

    def capture_sampler(self, bucket: Bucket, kind: frozenset[str], *, warm: bool) -> None:
        """Capture one more way to sample.   writes: bucket.samplers"""
        assert self.capturer is not None
        hidden = bucket.forward.result
        bucket.samplers[kind] = self.capturer(
            lambda: self.sample(bucket.inputs, hidden, kind), warm=warm
        )

    def forward(self, inputs: Tensor, plan: Any) -> Tensor:
        """The hidden states of a step. [size, hidden]   writes: the pools"""
        program, backend = self.program, self.attention.backend
        rows, starts = inputs
        batch = program.row_tables.batch(rows, starts, 1)
        if self.plans_itself:
            # Inside the graph, so that a replay gathers the page tables of the rows that it has.
            longest = np.full(len(rows), self.attention.max_seq_len, np.int32)
            step = program.row_tables.attention_step(rows, starts, 1, longest)
            backend.graph_update(plan, step)
        return self.compute(batch, plan)

    def forward_shared(self, inputs: Tensor, prefixes: PrefixInputs, hidden: Tensor) -> Tensor:
        """The hidden states of a step whose rows share leading pages.

        writes: the pools; hidden [size, hidden], so that the bucket's samplers serve both passes
        """
        tables, (rows, starts) = self.program.row_tables, inputs
        longest = np.full(len(rows), self.attention.max_seq_len, np.int32)
        step = tables.attention_step(rows, starts, 1, longest, prefixes)
        plan = self.attention.backend.capture_plan(step)
        return hidden.copy_(self.compute(tables.batch(rows, starts, 1), plan))

    def compute(self, batch: Batch, plan: Any) -> Tensor:
        """The hidden states of a batch of decode rows. [size, hidden]   writes: the pools"""
        program, layers, backend = self.program, self.attention.layers, self.attention.backend

        def attend(q: Tensor, index: int) -> Tensor:
            out = layers[index].empty_output(q)
            backend.forward(q, layers[index], plan, out)
            return out

        return program.model.forward(program.params, program.config, batch, attend, program.ops)

    def sample(self, inputs: Tensor, hidden: Tensor, kind: frozenset[str]) -> Sample:
        """The rows' next tokens.   writes: row_tables.tokens"""
        tables = self.program.row_tables
        rows, after = inputs[0], inputs[1] + 1
        sample = score_and_sample(self.program, hidden, tables.sampling(rows, after, kind))
        tables.keep(rows, after, sample)
        return sample

    def decode(self, step: DecodeStep) -> Sample | None:
        """What the step samples, by a replay; None when it has more rows than any bucket."""
        if step.query_len > 1:
            return self.verify(step)
        count = len(step.row_ids)
        bucket = self.bucket_for(count)
        if bucket is None:
            return None
        tables, size = self.program.row_tables, bucket.size
        upload(
            bucket.inputs.view(-1), (step.row_ids, size, tables.padding_row), (step.starts, size, 0)
        )
        if not self.plans_itself:
            # Planning reads lengths on the host, which no graph can do.
            rows, starts = bucket.inputs[:, :count]
            lens = (step.starts + 1).astype(np.int32)
            self.attention.backend.graph_update(
                bucket.plan, tables.attention_step(rows, starts, 1, lens)
            )
        if step.groups is not None and bucket.shared is not None:
            self.write_groups(step.groups)
            bucket.shared.replay()
        else:
            bucket.forward.replay()
        return self.sample_rows(bucket, count, step)

    def verify(self, step: DecodeStep) -> Sample | None:
        """What a step of several tokens a row samples, by a replay; None if no bucket has room."""
        count = len(step.row_ids)
        bucket = next((one for rows, one in self.verifying.items() if rows >= count), None)
        if bucket is None or self.program.verify_attention is None:
            return None
        write_verification(bucket.inputs, step, self.program.row_tables.padding_row)
        bucket.forward.replay()
        return self.sample_rows(bucket, count * step.query_len, step)

    def write_groups(self, groups: PrefixGroups) -> None:
        """Bring the inputs of shared prefixes up to date; nothing is done for the same groups."""
        assert self.prefixes is not None, "a bucket has `shared` only with them"
        if groups is not self.groups:
            self.program.row_tables.write_prefix_inputs(self.prefixes, groups)
            self.groups = groups

    def prompt(self, step: PromptStep) -> Sample | None:
        """What the scored tokens sample, by a replay; None when no bucket has room."""
        rows, padding_row = step.scored_rows, self.program.row_tables.padding_row
        count = len(rows)
        bucket = self.scorer_for(count)
        prompts = self.prompts
        if bucket is None or prompts is None or (tokens := prompts.bucket_for(step)) is None:
            return None
        # A row whose prompt goes on is scored too: its logits tell whether it is sound. It is the
        # padding row here, so that no sampled token replaces the next token of its prompt.
        rows = np.where(step.scored_is_sampled, rows, padding_row)
        size = bucket.size
        upload(
            bucket.lines.view(-1),
            (rows, size, padding_row),
            (step.scored_positions, size, 0),
            (step.scored_tokens, size, 0),
        )
        prompts.replay(tokens, step, bucket.lines[2], bucket.forward.result)
        return self.sample_rows(bucket, count, step)

    def bucket_for(self, count: int) -> Bucket | None:
        """The smallest bucket of at least so many rows."""
        return next((bucket for size, bucket in self.captured.items() if size >= count), None)

    def scorer_for(self, count: int) -> Bucket | None:
        """A bucket that scores at least so many tokens; one that verifies drafts scores several a
        row.
        """
        bucket = self.bucket_for(count)
        if bucket is not None:
            return bucket
        return next((one for one in self.verifying.values() if one.size >= count), None)

    def sample_rows(self, bucket: Bucket, count: int, step: DecodeStep | PromptStep) -> Sample:
        """What the bucket's hidden states sample for its first rows, by a replay if possible.

        writes: row_tables.tokens
        """
        if step.kind is None:
            return self.sample_eagerly(bucket, count, step.sampling())
        # The forward pass is launched, so the device computes while the host fills masks.
        step.prepare_sampling()
        kind = self.kinds.find(step.kind)
        if kind in bucket.samplers:
            bucket.samplers[kind].replay()
            return bucket.samplers[kind].result.first(count)
        # Computed before it is captured: this step needs its tokens now.
        sample = self.sample(bucket.inputs, bucket.forward.result, kind)
        self.try_capture_sampler(bucket, kind, warm=True)
        return sample.first(count)

    def try_capture_sampler(self, bucket: Bucket, kind: frozenset[str], *, warm: bool) -> None:
        """Capture a kind of sampling; a failure is final for the kind.

        writes: bucket.samplers
        """
        if kind in self.uncapturable:
            return
        try:
            self.capture_sampler(bucket, kind, warm=warm)
        except Exception as error:
            self.uncapturable.add(kind)
            frame = traceback.extract_tb(error.__traceback__)[-1]
            LOG.warning(
                "sampling by %s is not captured: %s, at %s:%s",
                ", ".join(sorted(kind)),
                error,
                frame.filename,
                frame.lineno,
            )

    def sample_eagerly(self, bucket: Bucket, count: int, sampling: Sampling) -> Sample:
        """The first rows' next tokens by settings that no graph samples by.

        writes: row_tables.tokens
        """
        sample = score_and_sample(self.program, bucket.forward.result[:count], sampling)
        rows, positions = bucket.inputs[:, :count]
        self.program.row_tables.keep(rows, positions + 1, sample)
        return sample

    def close(self) -> None:
        """Drop the graphs and the program, which refers to the weights and the pool."""
        self.drop_graphs()
        del self.program, self.attention

    def drop_graphs(self) -> None:
        """Forget every capture."""
        self.captured, self.verifying = {}, {}
        self.prompts = self.prefixes = self.groups = None
