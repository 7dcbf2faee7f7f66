"""Graphs of sampling: one for each bucket and kind of sampling."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from typing import Any

from attrs import frozen
from torch import Tensor

from headstock.nn.eager_step import score_and_sample
from headstock.spi import Program, Sample, Sampling, Step
from headstock_cuda_graph.capture import CapturedGraph, GraphCapturer
from headstock_cuda_graph.sampling_kinds import TRUNCATED, SamplingKinds
from headstock_cuda_graph.verify_graphs import PaddedLogits

LOG = logging.getLogger("headstock.cudagraph")


@frozen(eq=False)
class Bucket:
    """A captured forward pass of `size` rows: its input, its attention plan and its hidden states.

    shared: the same for rows that share leading pages, with the same hidden states; None if a
        bucket has none
    lines: [3, size] int64: row ids, positions, and indices of the rows' hidden states in a step
        with prompt tokens, or the tokens that drafts come behind
    drafts: makes drafts behind the rows; None where the model makes none, or not in a graph
    """

    size: int
    lines: Tensor
    plan: Any
    forward: CapturedGraph[Tensor]
    shared: CapturedGraph[Tensor] | None
    samplers: dict[frozenset[str], CapturedGraph[Sample]]
    drafts: CapturedGraph[Tensor] | None = None

    @property
    def inputs(self) -> Tensor:
        """Row ids and positions. [2, size] int64"""
        return self.lines[:2]


def pad_lines(lines: Tensor, padding_row: int) -> None:
    """Make all rows of a bucket padding, because work runs once before its capture.

    Padding rows only write to the dummy page. Buckets share their lines, so a step between two
    captures of one bucket leaves its own rows here.

    lines: [3, size] int64
    writes: lines
    """
    lines[0], lines[1:] = padding_row, 0


class SamplingGraphs:
    """Samples from the hidden states of buckets, and captures the sampling.

    capturer: None before the first captures
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.capturer: GraphCapturer | None = None
        self.kinds = SamplingKinds.list(program.rules)
        self.uncapturable: set[frozenset[str]] = set()

    def capture_first(self, bucket: Bucket) -> Iterator[None]:
        """Capture the initial kinds of sampling; pause after each but the last.

        writes: bucket.samplers, bucket.lines
        """
        for number, kind in enumerate(self.kinds.first):
            if number:
                yield
            pad_lines(bucket.lines, self.program.row_tables.padding_row)
            # Fills the hidden states: samplers are run before they are captured. A step since the
            # previous capture may have used their memory, which all graphs share.
            bucket.forward.replay()
            if kind <= TRUNCATED:
                self.capture(bucket, kind, warm=False)
            else:  # plugins take part in it, and a failing one must not affect other graphs
                self.try_capture(bucket, kind, warm=False)

    def capture(self, bucket: Bucket, kind: frozenset[str], *, warm: bool) -> None:
        """Capture one more kind of sampling.   writes: bucket.samplers"""
        assert self.capturer is not None
        hidden = bucket.forward.result
        bucket.samplers[kind] = self.capturer(
            lambda: self.sample(bucket.inputs, hidden, kind), warm=warm
        )

    def try_capture(self, bucket: Bucket, kind: frozenset[str], *, warm: bool) -> None:
        """Capture a kind of sampling; a failure is final for the kind.

        writes: bucket.samplers
        """
        if kind in self.uncapturable:
            return
        try:
            self.capture(bucket, kind, warm=warm)
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

    def sample(self, inputs: Tensor, hidden: Tensor, kind: frozenset[str]) -> Sample:
        """The rows' next tokens.   writes: row_tables.tokens"""
        tables = self.program.row_tables
        rows, after = inputs[0], inputs[1] + 1
        sample = score_and_sample(self.program, hidden, tables.sampling(rows, after, kind))
        tables.keep(rows, after, sample)
        return sample

    def sample_rows(
        self, bucket: Bucket, count: int, step: Step, padded: PaddedLogits | None = None
    ) -> Sample:
        """Sample the bucket's hidden states for its first rows, by a replay if possible.

        padded: the rows, if the step's own are only some of them
        writes: row_tables.tokens
        """
        sample = self.sample_first(bucket, count, step, padded).first(count)
        return sample.replayed(step.order if padded is None else padded.order)

    def sample_first(
        self, bucket: Bucket, count: int, step: Step, padded: PaddedLogits | None
    ) -> Sample:
        """Same as `sample_rows`, possibly with more rows."""
        settings = step.kind(None if padded is None else padded.order)
        if settings is None:
            rows = () if padded is None else (padded.row_ids, padded.positions)
            return self.sample_eagerly(bucket, count, step.sampling(*rows))
        # The forward pass is launched, so the device computes while the host fills masks.
        step.prepare_sampling()
        kind = self.kinds.find(settings)
        if kind in bucket.samplers:
            bucket.samplers[kind].replay()
            return bucket.samplers[kind].result
        # Computed before it is captured: this step needs its tokens now.
        sample = self.sample(bucket.inputs, bucket.forward.result, kind)
        self.try_capture(bucket, kind, warm=True)
        return sample

    def sample_eagerly(self, bucket: Bucket, count: int, sampling: Sampling) -> Sample:
        """The first rows' next tokens with settings that no graph supports.

        writes: row_tables.tokens
        """
        sample = score_and_sample(self.program, bucket.forward.result[:count], sampling)
        rows, positions = bucket.inputs[:, :count]
        self.program.row_tables.keep(rows, positions + 1, sample)
        return sample
