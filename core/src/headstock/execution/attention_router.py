"""Attention of a step that mixes phases, in one forward pass.

Decode rows go to one backend, all other rows to another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from attrs import frozen
from torch import Tensor

from headstock.execution.grouped_attention import GroupedAttention
from headstock.spi import AttendInto, AttentionBackend, AttentionStep, LayerInfo


@frozen(eq=False)
class PhaseRouter:
    """The backends by phase; one instance may serve both.

    layers: by number, those whose tokens stay in pages
    check: fill outputs with NaN first, so that what a backend leaves unwritten shows
    """

    prefill: AttentionBackend
    decode: AttentionBackend
    layers: Mapping[int, LayerInfo]
    check: bool = False

    def plan(self, decode: AttentionStep | None, extend: AttentionStep | None) -> AttendInto:
        """Plan attention over decode rows and the others, once for all layers."""
        decode_plan = self.decode.plan(decode) if decode is not None else None
        extend_plan = self.prefill.plan(extend) if extend is not None else None
        # Plans put decode rows first and each has one token, so rows and tokens split alike.
        split = decode.num_rows if decode is not None else 0

        def attend(q: Tensor, index: int, out: Tensor) -> None:
            if self.check:
                out.fill_(math.nan)
            layer = self.layers[index]
            if extend_plan is None:
                self.decode.forward(q, layer, decode_plan, out)
            elif decode_plan is None:
                self.prefill.forward(q, layer, extend_plan, out)
            else:
                self.decode.forward(q[:split], layer, decode_plan, out[:split])
                self.prefill.forward(q[split:], layer, extend_plan, out[split:])

        return attend

    @property
    def backends(self) -> tuple[AttentionBackend, ...]:
        """The backends of all KV groups, without repetition."""
        return tuple(
            dict.fromkeys(
                backend
                for each in (self.prefill, self.decode)
                for backend in (each.backends if isinstance(each, GroupedAttention) else (each,))
            )
        )

    def close(self) -> None:
        """Close the backends."""
        for backend in self.backends:
            backend.close()
