"""Attention of a planned step, as forward passes call it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headstock.spi import Attend, AttentionBackend, Program


def bind_plan(program: Program, backend: AttentionBackend, plan: Any) -> Attend:
    """The attention of a plan of the backend, by layer, each time into a tensor of its own."""
    layers = program.attention.layers

    def attend(q: Tensor, index: int) -> Tensor:
        out = layers[index].empty_output(q)
        backend.forward(q, layers[index], plan, out)
        return out

    return attend
