"""Steps with prompt tokens as graphs of what lies between the calls of attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attrs import frozen
from torch import Tensor

from headstock.spi import AttendInto, Program, PromptStep
from headstock_cuda_graph.recording import PiecewiseRecording, Recorder
from headstock_cuda_graph.uploads import upload


@frozen(eq=False)
class PromptBucket:
    """A recorded forward pass of `size` tokens: where its input is, and its hidden states.

    inputs: [2, size] int64, the seats and the positions of the tokens
    """

    size: int
    inputs: Tensor
    forward: PiecewiseRecording


class PromptGraphs:
    """Forward passes of steps with prompt tokens, by token count.

    Attention is called between the graphs for the tokens that the step has, with its own plan. So any backend serves,
    and any mix of rows; what pads a step to its bucket gets zeros for attention and writes to the dummy page.
    """

    def __init__(self, program: Program, recorder: Recorder) -> None:
        self.program = program
        self.recorder = recorder
        self.captured: dict[int, PromptBucket] = {}
        self.outputs: dict[tuple[int, ...], Tensor] = {}
        self.inputs = program.seats.tokens.new_empty(0)

    def capture(self, sizes: Sequence[int], report: Callable[[], None]) -> None:
        """Record forward passes of these token counts, largest first."""
        self.inputs = self.program.seats.tokens.new_empty(2 * max(sizes, default=0))
        for size in sizes:
            inputs = self.inputs[: 2 * size].view(2, size)
            inputs[0], inputs[1] = self.program.seats.nobody, 0

            def work(attend: AttendInto, inputs: Tensor = inputs) -> Tensor:
                return self.forward(inputs, attend)

            if self.recorder.is_worthwhile(work):
                self.captured[size] = PromptBucket(size, inputs, self.recorder.pieces(work))
            report()
        self.captured = dict(sorted(self.captured.items()))

    def forward(self, inputs: Tensor, attend_into: AttendInto) -> Tensor:
        """The hidden states of a bucket. [size, hidden]   writes: the pools"""
        program = self.program
        padding = (inputs[0] == program.seats.nobody)[:, None, None]

        def attend(q: Tensor, index: int) -> Tensor:
            out = self.output(q)
            if index == program.attention.layers[0].index:
                # The layers share it, and an earlier step may have left NaN here, which would reach the dummy page.
                out.masked_fill_(padding, 0)
            attend_into(q, index, out)
            return out

        batch = program.seats.batch(inputs[0], inputs[1])
        return program.model.forward(program.params, program.config, batch, attend, program.ops)

    def output(self, q: Tensor) -> Tensor:
        """Where attention of such queries is written: one place for all layers and buckets.

        q, returns: [tokens, heads, head_dim]
        """
        if q.shape[1:] not in self.outputs:  # the largest bucket comes first
            self.outputs[q.shape[1:]] = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        return self.outputs[q.shape[1:]][: len(q)]

    def replay(self, step: PromptStep) -> Tensor | None:
        """The hidden states of the step's tokens and of what pads them; None when no bucket has room for them.

        returns: [size, hidden]    writes: the pools
        """
        count = len(step.token_rows)
        bucket = next((bucket for size, bucket in self.captured.items() if size >= count), None)
        if bucket is None:
            return None
        seats = self.program.seats
        upload(bucket.inputs, (step.token_rows, step.positions), padding=(seats.nobody, 0))
        attention: list[AttendInto] = []

        def attend(q: Tensor, index: int, out: Tensor) -> None:
            if not attention:  # planned while the device computes the first queries
                attention.append(step.attention())
            attention[0](q[:count], index, out[:count])

        bucket.forward.replay(attend)
        return bucket.forward.result
