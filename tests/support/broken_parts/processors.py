"""Logits processors that are each wrong in one way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headstock.spi import LogitColumn, LogitsProcessor
from headstock.spi.arrays import Ints


class Sound(LogitsProcessor):
    """Adds a number to the scores."""

    changes_argmax = True

    @property
    def columns(self) -> Mapping[str, LogitColumn]:
        return {"shift": LogitColumn(neutral=0.0)}

    def row(self, args: Any, prompt: Ints, vocab: int) -> Mapping[str, Any] | None:
        return {"shift": 1.0}

    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        return logits + columns["shift"][:, None]


class Raises(Sound):
    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        return logits + columns["by"][:, None]


class ReturnsNone(Sound):
    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Any:
        logits.add_(columns["shift"][:, None])


class Halves(Sound):
    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        return logits.to(torch.float16)


class OtherDevice(Sound):
    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        return logits.to("meta")


class UnknownColumn(Sound):
    def row(self, args: Any, prompt: Ints, vocab: int) -> Mapping[str, Any] | None:
        return {"by": 1.0}


class MixesRows(Sound):
    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        return logits.roll(1, 0)


class WritesPositions(Sound):
    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        at.add_(1)
        return logits


class MovesBest(Sound):
    changes_argmax = False

    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        return -logits


class LeavesNan(Sound):
    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        return logits / 0 * 0
