"""The runner that replays decode steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from headstock.nn.program import run, score
from headstock.spi import Attend, Batch, CaptureReport, DecodeStep, Planning, Program, Runner, Sample
from headstock_cuda_graph import steps
from headstock_cuda_graph.buckets import buckets
from headstock_cuda_graph.recording import CudaRecorder, Recorder, Recording

LOG = logging.getLogger("headstock.cudagraph")


@frozen(eq=False)
class Bucket:
    """A recorded forward pass of `size` rows: where its input is, its attention plan, and its hidden states.

    inputs: [2, size] int64, the seats and the positions of the rows
    """

    size: int
    inputs: Tensor
    plan: Any
    forward: Recording[Tensor]
    samplers: dict[frozenset[str], Recording[Sample]]


class CudaGraphRunner(Runner):
    """Replays decode steps of up to as many rows as its largest bucket has; runs everything else as it comes."""

    def __init__(self, program: Program, recorder: Recorder | None = None) -> None:
        self.program = program
        self.attention = program.attention
        self.given = recorder
        self.recorder: Recorder | None = None
        self.query_start: Tensor | None = None
        self.recorded: dict[int, Bucket] = {}
        self.unrecorded: set[frozenset[str]] = set()
        self.plans_itself = self.attention.planning is Planning.NONE

    def run(self, batch: Batch, attend: Attend) -> Sample:
        """What the batch's logit positions sample.   writes: batch.pools"""
        return run(self.program, batch, attend)

    def buckets(self, most_rows: int) -> tuple[int, ...]:
        """The sizes that are recorded."""
        return buckets(most_rows)

    def capture(self, buckets: Sequence[int], report: CaptureReport) -> None:
        """Record steps of these sizes. After an error nothing is replayed."""
        self.recorded = {}
        if not buckets:
            return
        device = self.program.seats.tokens.device
        # A pool of memory ends with its last graph, so each capture begins one of its own.
        self.recorder = self.given or CudaRecorder()
        self.attention.backend.graph_init(buckets, self.attention.max_seq_len)
        inputs = torch.empty(2 * max(buckets), dtype=torch.int64, device=device)
        self.query_start = torch.arange(max(buckets) + 1, dtype=torch.int32, device=device)
        recorded = {}
        for size in buckets:
            recorded[size] = self.record(inputs[: 2 * size].view(2, size))
            report(len(recorded), len(buckets))
        self.recorded = dict(sorted(recorded.items()))

    def record(self, inputs: Tensor) -> Bucket:
        """A bucket in whose rows nobody sits, with its samplers for greedy rows and for temperatures."""
        assert self.recorder is not None
        size = inputs.shape[1]
        inputs[0], inputs[1] = self.program.seats.nobody, 0
        plan = self.attention.backend.graph_plan(size, self.attention_step(inputs, np.ones(size, np.int32)))
        forward = self.recorder(lambda: self.forward(inputs, plan), warm=False)
        bucket = Bucket(size, inputs, plan, forward, {})
        forward.replay()
        for kind in steps.SETTINGS[:2]:
            self.add_sampler(bucket, kind, warm=False)
        return bucket

    def add_sampler(self, bucket: Bucket, kind: frozenset[str], *, warm: bool) -> None:
        """Record one more way to sample.   writes: bucket.samplers"""
        assert self.recorder is not None
        hidden = bucket.forward.result
        bucket.samplers[kind] = self.recorder(lambda: self.sample(bucket.inputs, hidden, kind), warm=warm)

    def attention_step(self, inputs: Tensor, host_context_lens: np.ndarray) -> Any:
        """What the decode backend is told of the first rows, as many as there are lengths."""
        seats, count = self.program.seats, len(host_context_lens)
        columns = -(-int(host_context_lens.max()) // seats.page_size)
        assert self.query_start is not None, "capture comes first"
        rows, positions = inputs[:, :count]
        return steps.attention_step(seats, rows, positions, self.query_start[: count + 1], host_context_lens, columns)

    def forward(self, inputs: Tensor, plan: Any) -> Tensor:
        """The hidden states of a step. [size, hidden]   writes: the pools"""
        program, layers, backend = self.program, self.attention.layers, self.attention.backend
        batch = steps.batch(program.seats, inputs[0], inputs[1])
        if self.plans_itself:
            longest = np.full(inputs.shape[1], self.attention.max_seq_len, np.int32)
            backend.graph_update(plan, self.attention_step(inputs, longest))

        def attend(q: Tensor, index: int) -> Tensor:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            backend.forward(q, layers[index], plan, out)
            return out

        return program.model.forward(program.params, program.config, batch, attend, program.ops)

    def sample(self, inputs: Tensor, hidden: Tensor, kind: frozenset[str]) -> Sample:
        """The rows' next tokens.   writes: seats.tokens"""
        seats = self.program.seats
        rows, after = inputs[0], inputs[1] + 1
        sample = score(self.program, hidden, steps.sampling(seats, rows, after, kind))
        seats.tokens[rows, after] = sample.tokens
        return sample

    def decode(self, step: DecodeStep) -> Sample | None:
        """What the step samples, by a replay; None when it has more rows than any bucket."""
        count = len(step.rows)
        bucket = next((bucket for size, bucket in self.recorded.items() if size >= count), None)
        if bucket is None:
            return None
        self.load(bucket, step)
        if not self.plans_itself:
            lens = (step.positions + 1).astype(np.int32)
            self.attention.backend.graph_update(bucket.plan, self.attention_step(bucket.inputs, lens))
        bucket.forward.replay()
        if step.settings is None:
            return self.sample_apart(bucket, step)
        kind = steps.kind_of(step.settings)
        if kind in bucket.samplers:
            bucket.samplers[kind].replay()
            return first(bucket.samplers[kind].result, count)
        sample = self.sample(bucket.inputs, bucket.forward.result, kind)
        self.add_late(bucket, kind)
        return first(sample, count)

    def add_late(self, bucket: Bucket, kind: frozenset[str]) -> None:
        """Record a kind of sampling that was just answered; one that cannot be recorded is never tried again.

        writes: bucket.samplers
        """
        if kind in self.unrecorded:
            return
        try:
            self.add_sampler(bucket, kind, warm=True)
        except Exception as error:
            self.unrecorded.add(kind)
            LOG.warning("sampling by %s is not recorded: %s", ", ".join(sorted(kind)), error)

    def load(self, bucket: Bucket, step: DecodeStep) -> None:
        """Write the step's rows to the bucket's input; nobody sits in the others."""
        # Fresh memory each time: torch hands pinned memory out again only when its copy is over.
        host = torch.empty(bucket.inputs.shape, dtype=torch.int64, pin_memory=bucket.inputs.is_cuda)
        packed, count = host.numpy(), len(step.rows)
        packed[0, :count], packed[1, :count] = step.rows, step.positions
        packed[0, count:], packed[1, count:] = self.program.seats.nobody, 0
        bucket.inputs.copy_(host, non_blocking=True)

    def sample_apart(self, bucket: Bucket, step: DecodeStep) -> Sample:
        """The rows' next tokens by settings that no recording knows.   writes: seats.tokens"""
        count = len(step.rows)
        sample = score(self.program, bucket.forward.result[:count], step.sampling())
        rows, positions = bucket.inputs[:, :count]
        self.program.seats.tokens[rows, positions + 1] = sample.tokens
        return sample

    def close(self) -> None:
        """Forget the recordings and the program, which holds the weights and the pool."""
        self.recorded, self.query_start = {}, None
        del self.program, self.attention


def first(sample: Sample, count: int) -> Sample:
    """The first rows of a sample."""
    fields = {name: getattr(sample, name) for name in attrs.fields_dict(Sample)}
    return Sample(**{name: tensor[:count] for name, tensor in fields.items() if tensor is not None})
