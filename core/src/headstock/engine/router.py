"""Attention of a step that mixes phases: decode rows go to one backend, the others to another, in one forward pass."""

from __future__ import annotations

import math

import torch
from attrs import frozen
from torch import Tensor

from headstock.engine.batch import Step
from headstock.spi import Attend, AttentionBackend, LayerInfo


@frozen(eq=False)
class PhaseRouter:
    """The backends by phase; one instance may serve both. With `check`, what a backend leaves unwritten is NaN."""

    prefill: AttentionBackend
    decode: AttentionBackend
    layers: tuple[LayerInfo, ...]
    check: bool = False

    def attend(self, step: Step) -> Attend:
        """Attention over the step's rows, planned once for all layers."""
        decode = self.decode.plan(step.decode) if step.decode is not None else None
        extend = self.prefill.plan(step.extend) if step.extend is not None else None
        split = step.decode.num_rows if step.decode is not None else 0

        def attend(q: Tensor, index: int) -> Tensor:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            if self.check:
                out.fill_(math.nan)
            layer = self.layers[index]
            if extend is None:
                self.decode.forward(q, layer, decode, out)
            elif decode is None:
                self.prefill.forward(q, layer, extend, out)
            else:
                self.decode.forward(q[:split], layer, decode, out[:split])
                self.prefill.forward(q[split:], layer, extend, out[split:])
            return out

        return attend

    @property
    def backends(self) -> tuple[AttentionBackend, ...]:
        """Each backend once."""
        return (self.prefill,) if self.prefill is self.decode else (self.prefill, self.decode)

    def close(self) -> None:
        """Close the backends."""
        for backend in self.backends:
            backend.close()
