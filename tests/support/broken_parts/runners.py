"""Runners that are each wrong in one way."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from attrs import evolve
from fault_injection import spoil_rows

from headstock.builtin.eager import EagerRunner
from headstock.spi import Program, Sample, Step


class CannotBeMade(EagerRunner):
    def __init__(self, program: Program) -> None:
        self.width = program.config.hidden_size  # type: ignore[attr-defined]


class Raises(EagerRunner):
    def run(self, step: Step) -> Sample:
        raise RuntimeError("the stream is closed")


class ReturnsNone(EagerRunner):
    def run(self, step: Step) -> Any:
        super().run(step)


class TooFew(EagerRunner):
    def run(self, step: Step) -> Sample:
        return super().run(step).first(0)


class MovesRows(EagerRunner):
    def run(self, step: Step) -> Sample:
        sampled = super().run(step)
        return evolve(sampled, tokens=sampled.tokens.roll(1))


class StoresNothing(EagerRunner):
    def __init__(self, program: Program) -> None:
        tables: Any = copy(program.row_tables)
        tables.keep = lambda *given: None
        super().__init__(evolve(program, row_tables=tables))


class StoresOthers(EagerRunner):
    def __init__(self, program: Program) -> None:
        tables: Any = copy(program.row_tables)

        def keep(rows: Any, positions: Any, sample: Sample, scored: Any = None) -> None:
            moved = evolve(sample, tokens=sample.tokens.roll(1))
            program.row_tables.keep(rows, positions, moved, scored)

        tables.keep = keep
        super().__init__(evolve(program, row_tables=tables))


class StoresInPrompts(EagerRunner):
    def run(self, step: Step) -> Sample:
        return super().run(evolve(step, is_sampled=step.num_logits > 0))


class CallsAllHealthy(EagerRunner):
    def run(self, step: Step) -> Sample:
        sampled = super().run(spoil_rows(step, step.row_ids.tolist()))
        return evolve(sampled, healthy=torch.ones_like(sampled.healthy))


class ReturnsLists(EagerRunner):
    def run(self, step: Step) -> Any:
        sampled = super().run(step)
        return evolve(sampled, tokens=sampled.tokens.tolist())


class TokensAsFractions(EagerRunner):
    def run(self, step: Step) -> Sample:
        sampled = super().run(step)
        return evolve(sampled, tokens=sampled.tokens.float())
