"""Graphs of steps with prompt tokens: whole, or in pieces between attention calls."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from headstock.spi import AttendInto, PrefixInputs, Program, Step, StepInputs
from headstock_cuda_graph.capture import (
    CapturedGraph,
    GraphCapturer,
    PiecewiseGraph,
    PiecewiseWork,
)
from headstock_cuda_graph.graph_buckets import BucketKey, Capture
from headstock_cuda_graph.options import GraphOptions
from headstock_cuda_graph.prefixes import StaticPrefixes

FEW_ROWS = 16
"""Rows of the smaller one of a size's whole graphs.

A program of attention searches its tiles among all rows of a graph, however many the step has.
"""

MOST_MIXED_TOKENS = 4096
"""The largest size with a whole graph for steps of many rows.

Larger steps occur when prompts queue and throughput matters: with one graph at all sizes,
    `offline256` of the 0.6B shape took 0.3 and 0.7 % longer on an H100 than in pieces.
"""

FEW_TOKENS = 1024
"""The largest size with whole graphs of two kinds, for short contexts and for all.

These few queries leave processors idle unless a backend reads keys in parts, and parts are slower
for short contexts.

These sizes also have one of long contexts for rows that decode and share leading pages. On an H200,
gaps between tokens of 64 rows with 4,096 shared tokens fall from 9.5 to 5 ms alongside prompts of
128 to 512. Larger steps, where the prompts' work may hide the savings, were not measured.
"""

MOST_PADDING = 512
"""The maximum padding of a step, in tokens.

Only the size of full steps, far above the others, could need more. There, steps are device-bound,
    so padding costs its full compute time.
"""
HIDDEN = 4.0
"""A step is captured if the device needs less than this multiple of its launch time.

With overlap, the host launches a step when the previous one is nearly done, and reads that one's
tokens after the launches: decode rows wait for them. It also schedules, admits and delivers tokens,
under one GIL. If the device takes far longer than all this, padding only adds work.
"""


@frozen(eq=False)
class WholeGraph:
    """A forward pass including attention, of up to `rows` rows with up to `longest` tokens each.

    graph: its result is the hidden states of each row's last token, [rows, hidden]
    prefixes: of the decode rows, whose shared pages it reads once; None if it reads each row
        separately
    """

    rows: int
    longest: int
    graph: CapturedGraph[Tensor]
    prefixes: PrefixInputs | None = None


@frozen(eq=False)
class PromptBucket:
    """Captured forward passes of `size` tokens with one input.

    pieces: its result is the hidden states of all tokens, [size, hidden]
    wholes: in search order
    shared: used instead of the last of these, if decode rows share leading pages; None if there is
        none
    """

    size: int
    inputs: StepInputs
    pieces: PiecewiseGraph
    wholes: tuple[WholeGraph, ...]
    shared: WholeGraph | None = None


class PromptGraphs:
    """Forward passes of steps with prompt tokens, by token count.

    In pieces, attention is called between the graphs for the step's actual tokens, with its own
    plan, so any backend and any mix of rows works.

    A whole graph includes the attention calls of a backend that reads all lengths on the device. It
    serves decode rows too, if that backend attends for them.

    Padding of a step gets zeros as attention and writes to the dummy page.
    """

    def __init__(
        self,
        program: Program,
        capturer: GraphCapturer,
        max_rows: int,
        options: GraphOptions,
        prefixes: StaticPrefixes | None = None,
    ) -> None:
        self.program = program
        self.capturer = capturer
        self.max_rows = max_rows
        self.options = options
        self.prefixes = prefixes
        self.outputs: dict[tuple[int, ...], Tensor] = {}

    def key_of(self, size: int) -> BucketKey:
        """The key of a bucket of `size` tokens."""
        # A row of a step has a token, so no step has more rows than tokens.
        return BucketKey(size, min(size, self.max_rows), "prompt")

    def capture(self, key: BucketKey) -> Capture:
        """Capture forward passes of a size, if replays of them are worth it.

        The largest size comes first: smaller ones share its output.
        """
        size = key.tokens
        inputs = self.program.row_tables.step_inputs(key.rows, size)

        def work(attend_into: AttendInto) -> Tensor:
            return self.forward(inputs, attend_into)

        if not self.is_worthwhile(work, inputs.row_ids.device):
            return None
        yield
        wholes = []
        for rows, longest in self.list_wholes(size):
            wholes.append(self.capture_whole(inputs.first_rows(rows), longest))
            yield
        shared = self.capture_shared(size, inputs, wholes)
        if shared is not None:
            yield
        pieces = self.capturer.capture_pieces(work)
        return PromptBucket(size, inputs, pieces, tuple(wholes), shared)

    def is_worthwhile(self, work: PiecewiseWork, device: torch.device) -> bool:
        """Whether pieces of the work save time: on several ranks, what rank 0 measured."""
        ours = self.capturer.is_worthwhile(work, HIDDEN)
        ops = self.program.ops
        if ops.collectives.count == 1:
            return ours
        # Ranks whose measurements differ would capture different sums, and wait for ever.
        votes = ops.all_gather(torch.tensor([float(ours)], device=device))
        return bool(votes[0])

    def can_mix(self) -> bool:
        """Whether a whole graph may serve decode rows: one backend attends for all rows."""
        return self.program.prompt_attention is self.program.attention.backend

    def list_wholes(self, size: int) -> list[tuple[int, int]]:
        """The maximum rows and context of each whole graph of a size, in search order; none if no
        graph can include the backend's calls.
        """
        if self.program.prompt_attention is None or not self.options.whole_rows:
            return []
        most = min(size, self.max_rows, self.options.whole_rows)
        few = min(FEW_ROWS, most)
        if not self.can_mix() or size > MOST_MIXED_TOKENS:
            most = few
        longest = self.program.attention.max_seq_len
        short = min(self.options.short_context, longest) if size <= FEW_TOKENS else longest
        return list(dict.fromkeys([(few, short), (most, short), (most, longest)]))

    def capture_whole(
        self, inputs: StepInputs, longest: int, prefixes: PrefixInputs | None = None
    ) -> WholeGraph:
        """The whole forward pass of the inputs' rows, with contexts of up to `longest` tokens."""
        graph = self.capturer(lambda: self.forward_whole(inputs, longest, prefixes), warm=False)
        return WholeGraph(len(inputs.row_ids), longest, graph, prefixes)

    def capture_shared(
        self, size: int, inputs: StepInputs, wholes: Sequence[WholeGraph]
    ) -> WholeGraph | None:
        """The forward pass of the last of these graphs, for rows that share pages.

        None for sizes and rows without one.
        """
        if self.prefixes is None or not wholes or size > FEW_TOKENS:
            return None
        if not self.program.attention.shares_beside_prompts or not self.can_mix():
            return None
        rows, longest = wholes[-1].rows, wholes[-1].longest
        prefixes = self.prefixes.prepare_capture(rows)
        if prefixes is None:
            return None
        return self.capture_whole(inputs.first_rows(rows), longest, prefixes)

    def forward_whole(
        self, inputs: StepInputs, longest: int, prefixes: PrefixInputs | None = None
    ) -> Tensor:
        """The hidden states of each row's last token. [rows, hidden]   writes: the pools

        longest: the maximum tokens of a context    prefixes: as in `WholeGraph`
        """
        program, backend = self.program, self.program.prompt_attention
        assert backend is not None
        lens = np.full(len(inputs.row_ids), longest, np.int32)
        step = program.row_tables.attention_step(inputs, lens, prefixes)
        plan, layers = backend.capture_plan(step), program.attention.layers

        def attend(q: Tensor, index: int, out: Tensor) -> None:
            backend.forward(q, layers[index], plan, out)

        return self.forward(inputs, attend).index_select(0, step.query_start[1:] - 1)

    def forward(self, inputs: StepInputs, attend_into: AttendInto) -> Tensor:
        """The hidden states of a bucket's tokens. [tokens, hidden]   writes: the pools"""
        program = self.program
        batch = program.row_tables.batch(inputs)
        padding = (batch.token_rows == program.row_tables.padding_row)[:, None, None]
        cleared: set[torch.Size] = set()

        def attend(q: Tensor, index: int) -> Tensor:
            out = self.attention_output(q, index)
            if out.shape not in cleared:
                # Layers share it, and an earlier step may have left NaN, which would reach the
                # dummy page.
                out.masked_fill_(padding, 0)
                cleared.add(out.shape)
            attend_into(q, index, out)
            return out

        return program.model.forward(program.params, program.config, batch, attend, program.ops)

    def attention_output(self, q: Tensor, index: int) -> Tensor:
        """The output buffer of attention for such queries, shared by equal layers and all buckets.

        q: [tokens, heads, head_dim]    returns: [tokens, heads, out_dim]
        """
        out_dim = self.program.attention.layers[index].out_dim
        shape = q.shape[1:] if out_dim is None else torch.Size((q.shape[1], out_dim))
        if shape not in self.outputs:  # the largest bucket comes first
            self.outputs[shape] = torch.zeros(len(q), *shape, dtype=q.dtype, device=q.device)
        return self.outputs[shape][: len(q)]

    def whole_for(self, bucket: PromptBucket, step: Step) -> WholeGraph | None:
        """The whole graph of the step; None if it runs in pieces."""
        if not step.is_scored_once:  # the result of a whole graph has one token per row
            return None
        num_rows, longest = len(step.row_ids), int(step.stops.max())
        if step.groups is not None and self.can_share(bucket, num_rows, longest):
            return bucket.shared
        return self.find_whole(bucket, num_rows, longest, is_mixed=step.num_decode > 0)

    def find_whole(
        self, bucket: PromptBucket, num_rows: int, longest: int, *, is_mixed: bool
    ) -> WholeGraph | None:
        """The first graph with room for these rows and contexts that reads each row separately.

        is_mixed: whether the step has decode rows and prompts
        """
        if is_mixed and not self.can_mix():
            return None
        if is_mixed and bucket.size > FEW_TOKENS and longest > self.options.mixed_context:
            return None
        fitting = (w for w in bucket.wholes if num_rows <= w.rows and longest <= w.longest)
        return next(fitting, None)

    def can_share(self, bucket: PromptBucket, num_rows: int, longest: int) -> bool:
        """Whether a step with decode rows has a graph for their groups."""
        if bucket.shared is None:
            return False
        whole = self.find_whole(bucket, num_rows, longest, is_mixed=True)
        # Steps of short contexts have a faster one; the gain of groups there was not measured.
        return whole is bucket.wholes[-1]

    def replay(self, bucket: PromptBucket, step: Step, scored_tokens: Tensor, out: Tensor) -> None:
        """Compute the step in a bucket with room for it.

        scored_tokens: [n] int64, which tokens are scored; 0 past those of the step
        writes: out [n, hidden], the hidden states of the scored tokens; the pools
        """
        self.program.row_tables.write(bucket.inputs, step)
        whole = self.whole_for(bucket, step)
        if whole is not None:
            if whole.prefixes is not None and step.groups is not None:
                assert self.prefixes is not None, "a graph has them only with these"
                self.prefixes.write(step)
            whole.graph.replay()
            rows = len(step.row_ids)
            out[:rows].copy_(whole.graph.result[:rows])
            return
        count = step.num_tokens
        attention: list[AttendInto] = []

        def attend(q: Tensor, index: int, out: Tensor) -> None:
            if not attention:
                # Planned here rather than before the replay: the device computes the first queries
                # meanwhile.
                attention.append(step.attention())
            attention[0](q[:count], index, out[:count])

        bucket.pieces.replay(attend)
        torch.index_select(bucket.pieces.result, 0, scored_tokens, out=out)
