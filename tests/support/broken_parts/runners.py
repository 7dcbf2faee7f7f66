"""Runners that are each wrong in one way."""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve

from headstock.builtin.eager import EagerRunner
from headstock.spi import Batch, Program, Sample


class CannotBeMade(EagerRunner):
    def __init__(self, program: Program) -> None:
        self.width = program.config.hidden_size  # type: ignore[attr-defined]


class Raises(EagerRunner):
    def run(self, batch: Batch, attend: Any) -> Sample:
        raise RuntimeError("the stream is closed")


class ReturnsNone(EagerRunner):
    def run(self, batch: Batch, attend: Any) -> Any:
        super().run(batch, attend)


class TooFew(EagerRunner):
    def run(self, batch: Batch, attend: Any) -> Sample:
        return super().run(batch, attend).first(0)


class MovesRows(EagerRunner):
    def run(self, batch: Batch, attend: Any) -> Sample:
        sampled = super().run(batch, attend)
        return evolve(sampled, tokens=sampled.tokens.roll(1))


class CallsAllHealthy(EagerRunner):
    def run(self, batch: Batch, attend: Any) -> Sample:
        sampled = super().run(batch, lambda q, layer: attend(q, layer) * torch.nan)
        return evolve(sampled, healthy=torch.ones_like(sampled.healthy))


class ReturnsLists(EagerRunner):
    def run(self, batch: Batch, attend: Any) -> Any:
        sampled = super().run(batch, attend)
        return evolve(sampled, tokens=sampled.tokens.tolist())


class TokensAsFractions(EagerRunner):
    def run(self, batch: Batch, attend: Any) -> Sample:
        sampled = super().run(batch, attend)
        return evolve(sampled, tokens=sampled.tokens.float())
