"""The runner that replays steps as CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstock.nn.eager_step import run_eager_step
from headstock.nn.planned_attention import bind_plan
from headstock.spi import (
    Batch,
    CaptureProgress,
    Planning,
    PrefixInputs,
    Program,
    ReplayLimits,
    ReplaySizes,
    Runner,
    Sample,
    Step,
    StepInputs,
)
from headstock_cuda_graph.buckets import row_buckets, token_buckets
from headstock_cuda_graph.capture import CapturedGraph, CudaGraphCapturer, GraphCapturer
from headstock_cuda_graph.draft_graphs import add_drafts, can_draft, capture_drafts, keep_tokens
from headstock_cuda_graph.graph_buckets import BucketKey, Capture, GraphBuckets, Kind
from headstock_cuda_graph.options import GraphOptions
from headstock_cuda_graph.prefixes import StaticPrefixes
from headstock_cuda_graph.prompt_graphs import MOST_PADDING, PromptBucket, PromptGraphs
from headstock_cuda_graph.sampling_graphs import Bucket, SamplingGraphs, pad_lines
from headstock_cuda_graph.uploads import upload
from headstock_cuda_graph.verify_graphs import (
    PaddedLogits,
    can_pad,
    forward_verification,
    keeps_state,
    verify_rows,
    write_verification,
)


class CudaGraphRunner(Runner):
    """Replays steps that fit in a bucket and runs all others operation by operation.

    A replayed step is two graphs: the forward pass, one per bucket, and sampling, one per bucket
    and kind. Buckets of `prefixes.SHARED_ROWS` and more have a second forward pass, for rows that
    share leading pages, if the backend uses that.

    Graphs read their inputs at the addresses of the capture, so every input has a fixed address.
    One upload per step writes rows and positions, and the graph makes the rest from `RowTables` on
    the device (docs/decisions/0015, 0016).
    """

    def __init__(
        self,
        program: Program,
        options: GraphOptions | None = None,
        capturer: GraphCapturer | None = None,
    ) -> None:
        self.program = program
        self.options = options or GraphOptions()
        self.attention = program.attention
        self.injected_capturer = capturer
        self.capturer: GraphCapturer | None = None
        self.buckets = GraphBuckets()
        self.prompts: PromptGraphs | None = None
        self.prefixes: StaticPrefixes | None = None
        self.sampling = SamplingGraphs(program)
        self.plans_itself = self.attention.planning is Planning.NONE

    def run(self, step: Step) -> Sample:
        """Sample the step's scored tokens, by a replay if there is one.

        writes: the pools, the token table
        """
        # Operation by operation, a step of the 0.6B shape has 324 launches, which take the host 7
        # ms (docs/decisions/0016-replayed-prompt-steps.md).
        sample = self.replay(step) if step.is_plain else None
        return run_eager_step(self.program, step) if sample is None else sample

    def replay(self, step: Step) -> Sample | None:
        """Sample the step by a replay; None if no bucket has room for it."""
        if step.is_decode:
            return self.replay_rows(step)
        sample = None if step.num_drafts is None else self.replay_verification(step)
        if sample is not None or (step.num_drafts is not None and keeps_state(self.program)):
            return sample  # graphs of prompts keep no states behind drafts
        return self.replay_prompts(step)

    def prepare(self, limits: ReplayLimits, report: CaptureProgress) -> ReplaySizes:
        """Capture steps up to these sizes, largest first; after an error nothing is replayed.

        If captures may be deferred, only the largest size of each kind of step is captured.
        """
        rows, tokens = row_buckets(limits.max_rows), token_buckets(limits.max_tokens)
        if tokens and limits.full_tokens > tokens[0]:
            tokens = (limits.full_tokens, *tokens)
        if self.program.has_own_drafts:
            # Steps with prompts need all hidden states, of which a replay leaves the scored ones.
            rows, tokens = (rows if can_draft(self.program) else ()), ()
        if not rows:
            self.drop_graphs()
            return ReplaySizes()
        with self.drop_graphs_after_errors():
            keys = begun = self.begin_captures(rows, tokens)
            if limits.may_defer:
                # Later captures fit into the memory of these.
                largest = {key.kind: key for key in reversed(begun)}
                keys = [largest[kind] for kind in ("prompt", "rows") if kind in largest]
            for number, key in enumerate(keys, start=1):
                self.buckets.finish(key)
                report(number, len(begun))
        # The first requests need the small ones.
        waiting = self.buckets.waiting = dict(sorted(self.buckets.waiting.items()))
        if not waiting:
            tokens = tuple(reversed(self.buckets.of_kind("prompt")))
        return ReplaySizes(rows=rows, tokens=tokens, num_left=len(waiting))

    def prepare_next(self) -> int:
        """Capture one more graph; return how many sizes remain."""
        self.buckets.advance()
        return len(self.buckets.waiting)

    def begin_captures(self, sizes: Sequence[int], prompt_sizes: Sequence[int]) -> list[BucketKey]:
        """Begin a capture of each size, largest first, replacing all earlier ones."""
        self.drop_graphs()
        # A memory pool ends with its last graph, so each capture begins a new pool.
        self.capturer = self.injected_capturer or CudaGraphCapturer()
        self.sampling.capturer = self.capturer
        program, most, buckets = self.program, max(sizes), self.buckets
        self.prefixes = StaticPrefixes.new(program, most)
        self.prompts = PromptGraphs(program, self.capturer, most, self.options, self.prefixes)
        for size in prompt_sizes:
            key = self.prompts.key_of(size)
            buckets.add(key, self.prompts.capture(key))
        self.attention.backend.graph_init(sizes, self.attention.max_seq_len)
        lines = torch.empty(3 * most, dtype=torch.int64, device=program.row_tables.device)
        for size in sizes:
            capture = self.capture_bucket(lines[: 3 * size].view(3, size))
            buckets.add(BucketKey(size, size, "rows"), capture)
        for rows in verify_rows(tuple(sizes), program.verify_len):
            key = BucketKey(rows * program.verify_len, rows, "verify")
            buckets.add(key, self.capture_verify_bucket(rows, BucketKey(most, most, "rows")))
        return list(buckets.waiting)

    @contextmanager
    def drop_graphs_after_errors(self) -> Iterator[None]:
        """Leave nothing to replay when this block raises."""
        try:
            yield
        except BaseException:
            self.drop_graphs()
            raise

    def capture_bucket(self, lines: Tensor) -> Capture:
        """Capture a bucket, with samplers for greedy rows and for temperatures.

        lines: [3, size] int64, which the bucket keeps
        writes: lines
        """
        assert self.capturer is not None
        size, inputs = lines.shape[1], lines[:2]
        pad_lines(lines, self.program.row_tables.padding_row)
        step = self.program.row_tables.attention_step(
            one_token_each(inputs), np.ones(size, np.int32)
        )
        plan = self.attention.backend.graph_plan(size, step)
        forward = self.capturer(lambda: self.forward(inputs, plan), warm=False)
        yield
        shared, hidden = None, forward.result
        prefixes = None if self.prefixes is None else self.prefixes.prepare_capture(size)
        if prefixes is not None:
            pad_lines(lines, self.program.row_tables.padding_row)
            shared = self.capturer(
                lambda: self.forward_shared(inputs, prefixes, hidden), warm=False
            )
            yield
        bucket = Bucket(size, lines, plan, forward, shared, {})
        yield from self.sampling.capture_first(bucket)
        return capture_drafts(self.program, self.capturer, bucket, 1)

    def capture_verify_bucket(self, rows: int, largest: BucketKey) -> Capture:
        """Capture a bucket of rows that verify drafts, with one line per token.

        If no graph may include attention calls, the bucket only has samplers.

        largest: a bucket that is already captured
        """
        program = self.program
        assert self.capturer is not None
        hidden = self.buckets.captured[largest].forward.result
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
            yield
        bucket = Bucket(rows * length, lines, None, forward, None, {})
        yield from self.sampling.capture_first(bucket)
        return capture_drafts(program, self.capturer, bucket, length)

    def forward(self, inputs: Tensor, plan: Any) -> Tensor:
        """The hidden states of a step. [size, hidden]   writes: the pools"""
        program, backend = self.program, self.attention.backend
        rows = one_token_each(inputs)
        batch = program.row_tables.batch(rows)
        if self.plans_itself:
            # Inside the graph, so that a replay gathers the page tables of its actual rows.
            longest = np.full(inputs.shape[1], self.attention.max_seq_len, np.int32)
            step = program.row_tables.attention_step(rows, longest)
            backend.graph_update(plan, step)
        return self.compute(batch, plan)

    def forward_shared(self, inputs: Tensor, prefixes: PrefixInputs, hidden: Tensor) -> Tensor:
        """The hidden states of a step whose rows share leading pages.

        writes: the pools; hidden [size, hidden], so that the bucket's samplers serve both passes
        """
        tables, rows = self.program.row_tables, one_token_each(inputs)
        longest = np.full(inputs.shape[1], self.attention.max_seq_len, np.int32)
        plan = self.attention.backend.capture_plan(tables.attention_step(rows, longest, prefixes))
        return hidden.copy_(self.compute(tables.batch(rows), plan))

    def compute(self, batch: Batch, plan: Any) -> Tensor:
        """The hidden states of a batch of decode rows. [size, hidden]   writes: the pools"""
        program = self.program
        attend = bind_plan(program, self.attention.backend, plan)
        return program.model.forward(program.params, program.config, batch, attend, program.ops)

    def replay_rows(self, step: Step) -> Sample | None:
        """Sample a step of decode rows; None if it has more rows than any bucket."""
        count = len(step.row_ids)
        # Captured sampling stores every token, and no graph leaves one out.
        bucket = self.find_bucket("rows", count, count) if step.is_sampled.all() else None
        if bucket is None:
            return None
        step = step.grouped()
        tables, size = self.program.row_tables, bucket.size
        upload(
            bucket.inputs.view(-1), (step.row_ids, size, tables.padding_row), (step.starts, size, 0)
        )
        keep_tokens(self.program, bucket)
        if not self.plans_itself:
            # Planning reads lengths on the host, which a graph cannot do.
            rows = one_token_each(bucket.inputs[:, :count])
            lens = step.stops.astype(np.int32)
            self.attention.backend.graph_update(bucket.plan, tables.attention_step(rows, lens))
        if step.groups is not None and bucket.shared is not None:
            assert self.prefixes is not None, "a bucket has `shared` only with them"
            self.prefixes.write(step)
            bucket.shared.replay()
        else:
            bucket.forward.replay()
        return add_drafts(self.sampling.sample_rows(bucket, count, step), bucket, count)

    def replay_verification(self, step: Step) -> Sample | None:
        """Sample a step whose rows all verify drafts; None if no bucket has room.

        Rows with fewer drafts than a bucket are padded: they compute stale tokens of the token
        table, and those samples are dropped.
        """
        program, length = self.program, self.program.verify_len
        if program.verify_attention is None or not can_pad(step, program):
            return None
        count = len(step.row_ids)
        bucket = self.find_bucket("verify", count, count * length)
        if bucket is None:
            return None
        padded = PaddedLogits.of(step, length)
        write_verification(bucket.inputs, padded, program.row_tables.padding_row)
        keep_tokens(program, bucket)
        bucket.forward.replay()
        sample = self.sampling.sample_rows(bucket, len(padded.row_ids), step, padded)
        return add_drafts(sample, bucket, count)

    def replay_prompts(self, step: Step) -> Sample | None:
        """Sample a step with prompt tokens by a replay; None if no bucket has room."""
        # Both before the upload, which a capture of rows would overwrite.
        tokens = self.find_prompt_bucket(len(step.row_ids), step.num_tokens)
        bucket = None if tokens is None else self.find_scorer(int(step.num_logits.sum()))
        prompts = self.prompts
        if bucket is None or prompts is None or tokens is None:
            return None
        step = self.group_beside_prompts(tokens, step)
        rows, padding_row = step.scored_rows, self.program.row_tables.padding_row
        # A row whose prompt continues is scored too, to check its logits. It is the padding row
        # here, so that no sampled token replaces the next token of its prompt.
        stored = step.is_sampled.repeat(step.num_logits)
        size = bucket.size
        upload(
            bucket.lines.view(-1),
            (np.where(stored, rows, padding_row), size, padding_row),
            (step.scored_positions, size, 0),
            (step.scored_tokens, size, 0),
        )
        prompts.replay(tokens, step, bucket.lines[2], bucket.forward.result)
        return self.sampling.sample_rows(bucket, len(rows), step)

    def group_beside_prompts(self, bucket: PromptBucket, step: Step) -> Step:
        """The step group by group, if a graph of the bucket reads shared pages once."""
        # With separate attention calls, two more calls per layer would make the streams wait
        # (docs/decisions/0019-shared-prefixes.md). A group has two rows.
        if self.prefixes is None or self.prompts is None or step.num_decode < 2:
            return step
        if not step.is_scored_once:  # the result of a whole graph has one token a row
            return step
        longest = int(step.stops.max())
        can_share = self.prompts.can_share(bucket, len(step.row_ids), longest)
        return step.grouped() if can_share else step

    def find_bucket(self, kind: Kind, rows: int, tokens: int) -> Bucket | None:
        """The smallest bucket with room, captured now if necessary; None if there is none."""
        key = self.buckets.find_key(kind, rows, tokens)
        bucket: Bucket | None = None if key is None else self.buckets.take(key)
        return bucket

    def find_prompt_bucket(self, num_rows: int, num_tokens: int) -> PromptBucket | None:
        """The bucket of a step with prompt tokens; None if its size is far too large, or replays of
        it are not worth it.
        """
        key = self.buckets.find_key("prompt", num_rows, num_tokens)
        if key is None or key.tokens - num_tokens > MOST_PADDING:
            return None
        bucket: PromptBucket | None = self.buckets.take(key)
        return bucket

    def find_scorer(self, count: int) -> Bucket | None:
        """A bucket that scores at least this many tokens; one that verifies drafts scores several
        per row.
        """
        for kind in ("rows", "verify"):
            bucket = self.find_bucket(kind, 0, count)
            if bucket is not None:
                return bucket
        return None

    def close(self) -> None:
        """Drop the graphs and the program, which refers to the weights and the pool."""
        self.drop_graphs()
        del self.program, self.attention, self.sampling

    def drop_graphs(self) -> None:
        """Drop all captures."""
        self.buckets = GraphBuckets()
        self.prompts = self.prefixes = None


def one_token_each(lines: Tensor) -> StepInputs:
    """The inputs of rows that compute one token each.

    lines: [2, rows] int64, row ids and positions
    """
    rows, starts = lines
    return StepInputs.of_rows(rows, starts, 1)
