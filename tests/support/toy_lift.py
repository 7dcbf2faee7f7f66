"""Operations of the toy model that read what requests give a plugin: it lifts their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from attrs import evolve, frozen
from torch import Tensor
from toy_plugins import ToyOps
from toy_plugins import ops as toy_ops

from headstock.scheduler import Request
from headstock.spi import (
    Batch,
    LayerConfig,
    LogitColumn,
    LogitsProcessor,
    LogitsSpec,
    OpsSpec,
    SpiRange,
    Stream,
)
from headstock.spi.arrays import Ints
from headstock_conformance.scheduler.toy_device import next_token


@frozen
class LiftArgs:
    """`extra_args={"lift": 3}`: what is added to each token before it becomes a key."""

    lift: int


def spec() -> LogitsSpec:
    """The plugin `lift`, which leaves logits as they are."""
    return LogitsSpec(
        name="lift",
        spi=SpiRange(0, 3),
        summary="lifts the tokens of a request",
        implementation="toy_lift:Lift",
        request_args="toy_lift:LiftArgs",
    )


def ops() -> OpsSpec:
    """The operations `lifted`."""
    return evolve(toy_ops(), name="lifted", spi=SpiRange(0, 3), implementation="toy_lift:LiftedOps")


class Lift(LogitsProcessor):
    """Keeps a request's lift."""

    @property
    def columns(self) -> Mapping[str, LogitColumn]:
        """By how much."""
        return {"by": LogitColumn(neutral=0, dtype="int64", in_forward=True)}

    @property
    def changes_argmax(self) -> bool:
        """Nothing is changed."""
        return False

    def row(self, args: Any, prompt: Ints, vocab: int) -> Mapping[str, Any] | None:
        """What a request says."""
        return {"by": args.lift} if isinstance(args, LiftArgs) else None

    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """The logits as they are."""
        return logits


class LiftedOps(ToyOps):
    """The toy's operations, over lifted tokens."""

    def qkv_rope_store(self, x: Stream, layer: LayerConfig, batch: Batch) -> Tensor:
        """As the toy's."""
        return super().qkv_rope_store(x, layer, self.lift(batch))

    def lift(self, batch: Batch) -> Batch:
        """The batch with lifted tokens."""
        table = batch.columns.read("lift", "by")
        if table is None:
            return batch
        return evolve(batch, tokens=batch.tokens + table[batch.token_rows])


def lift_of(request: Request) -> int:
    """By how much the request's tokens are lifted."""
    lift: int = (request.extra_args or {}).get("lift", 0)
    return lift


def lifted_answer(request: Request) -> list[int]:
    """The greedy answer of a request."""
    history = request.prompt.astype(np.int64).tolist()
    while len(history) < request.max_len:
        history.append(next_token(np.array(history) + lift_of(request)))
    return history[len(request.prompt) :]
