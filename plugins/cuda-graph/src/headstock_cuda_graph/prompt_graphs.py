"""Graphs of steps with prompt tokens: whole, or in pieces between the calls of attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from headstock.spi import AttendInto, Program, PromptStep
from headstock_cuda_graph.capture import CapturedGraph, GraphCapturer, PiecewiseGraph
from headstock_cuda_graph.uploads import upload

WHOLE_ROWS = 16
"""The most rows of a step that is replayed whole; a step with more is replayed in pieces.

The launch of attention in a whole graph is sized for so many rows of full length, whatever the step
has.
"""
WHOLE_CONTEXT = 2048
"""The longest context of a step that is replayed whole.

Inside a graph attention is launched alike for any lengths, so backends read keys in one part, as is
best for short contexts. In pieces they see the lengths.
"""


@frozen(eq=False)
class PromptBucket:
    """Captured forward passes of `size` tokens, which read one input.

    inputs: [2 * size + 3 * WHOLE_ROWS] int64: row ids and positions of the tokens; then, for
        `whole` alone, the id of each row, where its tokens end, and its length after the step
    pieces: its result is the hidden states of all tokens, [size, hidden]
    whole: its result is those of each row's last token, [WHOLE_ROWS, hidden]; or None
    """

    size: int
    inputs: Tensor
    pieces: PiecewiseGraph
    whole: CapturedGraph[Tensor] | None


class PromptGraphs:
    """Forward passes of steps with prompt tokens, by token count.

    In pieces, attention is called between the graphs for the tokens that the step has, with a plan
    of its own. So any backend serves, and any mix of rows.

    A whole graph has the calls of attention in it. It serves steps of a few short rows, none of
    which decodes, with a backend that reads all lengths on the device.

    What pads a step to its bucket gets zeros for attention and writes to the dummy page.
    """

    def __init__(self, program: Program, capturer: GraphCapturer) -> None:
        self.program = program
        self.capturer = capturer
        self.captured: dict[int, PromptBucket] = {}
        self.outputs: dict[tuple[int, ...], Tensor] = {}
        self.inputs = program.row_tables.tokens.new_empty(0)

    def capture(self, sizes: Sequence[int], report: Callable[[], None]) -> None:
        """Capture forward passes of these token counts, largest first."""
        rows, padding_row = 3 * WHOLE_ROWS, self.program.row_tables.padding_row
        self.inputs = self.program.row_tables.tokens.new_empty(2 * max(sizes, default=0) + rows)
        for size in sizes:
            # All buckets read the beginning of one buffer, as one step runs at a time. For the
            # capture every token and row is padding.
            inputs = self.inputs[: 2 * size + rows]
            inputs[:size], inputs[size:], inputs[2 * size : 2 * size + WHOLE_ROWS] = (
                padding_row,
                0,
                padding_row,
            )
            inputs[-2 * WHOLE_ROWS :] = 1

            pieces = partial(self.forward, inputs[: 2 * size].view(2, size))
            if self.capturer.is_worthwhile(pieces):
                whole = self.capture_whole(inputs, size)
                self.captured[size] = PromptBucket(
                    size, inputs, self.capturer.capture_pieces(pieces), whole
                )
            report()
        # Ascending: the first bucket with room is the smallest one.
        self.captured = dict(sorted(self.captured.items()))

    def capture_whole(self, inputs: Tensor, size: int) -> CapturedGraph[Tensor] | None:
        """The whole forward pass; None when a graph cannot have the backend's calls in it."""
        if self.program.prompt_attention is None:
            return None
        return self.capturer(lambda: self.forward_whole(inputs, size), warm=False)

    def forward_whole(self, inputs: Tensor, size: int) -> Tensor:
        """The hidden states of each row's last token. [WHOLE_ROWS, hidden]   writes: the pools"""
        program, backend = self.program, self.program.prompt_attention
        assert backend is not None
        rows, ends, lens = inputs[2 * size :].view(3, WHOLE_ROWS)
        step = program.row_tables.prompt_attention(
            rows, F.pad(ends, (1, 0)).int(), lens.int(), size, program.attention.max_seq_len
        )
        plan, layers = backend.capture_plan(step), program.attention.layers

        def attend(q: Tensor, index: int, out: Tensor) -> None:
            backend.forward(q, layers[index], plan, out)

        return self.forward(inputs[: 2 * size].view(2, size), attend).index_select(0, ends - 1)

    def forward(self, tokens: Tensor, attend_into: AttendInto) -> Tensor:
        """The hidden states of a bucket. [size, hidden]

        tokens: [2, size] int64
        writes: the pools
        """
        program = self.program
        padding = (tokens[0] == program.row_tables.padding_row)[:, None, None]

        def attend(q: Tensor, index: int) -> Tensor:
            out = self.attention_output(q)
            if index == program.attention.layers[0].index:
                # The layers share it, and an earlier step may have left NaN here, which would reach
                # the dummy page.
                out.masked_fill_(padding, 0)
            attend_into(q, index, out)
            return out

        batch = program.row_tables.batch(tokens[0], tokens[1])
        return program.model.forward(program.params, program.config, batch, attend, program.ops)

    def attention_output(self, q: Tensor) -> Tensor:
        """Where attention of such queries is written, the same for all layers and buckets.

        q, returns: [tokens, heads, head_dim]
        """
        if q.shape[1:] not in self.outputs:  # the largest bucket comes first
            self.outputs[q.shape[1:]] = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        return self.outputs[q.shape[1:]][: len(q)]

    def bucket_for(self, step: PromptStep) -> PromptBucket | None:
        """The smallest bucket with room for the step's tokens."""
        count = len(step.token_rows)
        return next((bucket for size, bucket in self.captured.items() if size >= count), None)

    def has_room(self, step: PromptStep) -> bool:
        """Whether some bucket has room for the step's tokens."""
        return self.bucket_for(step) is not None

    def is_whole(self, bucket: PromptBucket, step: PromptStep) -> bool:
        """Whether the step is replayed as one graph."""
        if bucket.whole is None or step.num_decode or len(step.last_tokens) > WHOLE_ROWS:
            return False
        return int(step.positions[step.last_tokens].max()) < WHOLE_CONTEXT

    def replay(self, step: PromptStep, last_tokens: Tensor, out: Tensor) -> None:
        """Compute the step.

        last_tokens: [n] int64, which tokens are scored; 0 past the step's rows
        writes: out [n, hidden], the hidden states of each row's last token; the pools
        """
        bucket = self.bucket_for(step)
        assert bucket is not None, "has_room comes first"
        rows, last = len(step.last_tokens), step.last_tokens
        count, size, padding_row = (
            len(step.token_rows),
            bucket.size,
            self.program.row_tables.padding_row,
        )
        tokens = (step.token_rows, size, padding_row), (step.positions, size, 0)
        if self.is_whole(bucket, step):
            assert bucket.whole is not None
            row_ids, lens = (
                (step.token_rows[last], WHOLE_ROWS, padding_row),
                (step.positions[last] + 1, WHOLE_ROWS, 1),
            )
            upload(bucket.inputs, *tokens, row_ids, (last + 1, WHOLE_ROWS, count), lens)
            bucket.whole.replay()
            out[:rows].copy_(bucket.whole.result[:rows])
            return
        upload(bucket.inputs[: 2 * size], *tokens)
        attention: list[AttendInto] = []

        def attend(q: Tensor, index: int, out: Tensor) -> None:
            if not attention:
                # Planned here and not before the replay: the device computes the first queries
                # meanwhile.
                attention.append(step.attention())
            attention[0](q[:count], index, out[:count])

        bucket.pieces.replay(attend)
        torch.index_select(bucket.pieces.result, 0, last_tokens, out=out)
