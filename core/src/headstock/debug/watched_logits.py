"""A logits processor whose answers are checked, for `--debug-invariants`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from headstock.debug.watch import DebugWatch
from headstock.errors import PluginBroken
from headstock.nn.sampler import apply_processor
from headstock.spi import LogitColumn, LogitsProcessor
from headstock.spi.arrays import Ints

MOST_ALONE = 4
"""Rows of a step that are processed again, alone."""


class WatchedProcessor(LogitsProcessor):
    """Calls `inner`; raises PluginBroken when it writes what it may only read, or changes rows that
    it must leave alone.

    Replays of graphs have no calls and are not watched.
    """

    def __init__(self, inner: LogitsProcessor, name: str, watch: DebugWatch) -> None:
        self.inner = inner
        self.name = name
        self.watch = watch

    @property
    def columns(self) -> Mapping[str, LogitColumn]:
        """As `inner`."""
        return self.inner.columns

    @property
    def changes_argmax(self) -> bool:
        """As `inner`."""
        return self.inner.changes_argmax

    def row(self, args: Any, prompt: Ints, vocab: int) -> Mapping[str, Any] | None:
        """As `inner`."""
        return self.inner.row(args, prompt, vocab)

    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """Process by `inner`, and check what it did.   raises: PluginBroken"""
        if not self.watch.is_running:
            return self.inner.apply(logits, at, columns)
        before, given = logits.clone(), {name: column.clone() for name, column in columns.items()}
        positions = at.clone()
        scores = apply_processor(self.inner, logits, at, columns)
        if not torch.equal(at, positions):
            self._blame("wrote to the positions that it is given")
        for name, column in given.items():
            if not torch.equal(columns[name], column):
                self._blame(f"wrote to its column {name!r}")
        self._check_scores(scores, before, given)
        for row in range(min(len(before), MOST_ALONE)) if len(before) > 1 else ():
            own = slice(row, row + 1)
            pick = {name: column[own].clone() for name, column in given.items()}
            alone = apply_processor(self.inner, before[own].clone(), positions[own].clone(), pick)
            # Sums of other numbers of rows may be rounded otherwise.
            if not torch.allclose(alone, scores[own], rtol=1e-3, atol=1e-3, equal_nan=True):
                self._blame(f"gave logit {row} other scores beside others than alone")
        return scores

    def _check_scores(self, scores: Tensor, before: Tensor, given: Mapping[str, Tensor]) -> None:
        """Raise PluginBroken for scores that no values of the columns can ask for."""
        worse = (scores.isnan() & ~before.isnan()).any(-1) | (
            scores.isposinf() & ~before.isposinf()
        ).any(-1)
        empty = ~(scores > -torch.inf).any(-1) & (before > -torch.inf).any(-1)
        for rows, what in ((worse, "scores that are not finite"), (empty, "no token")):
            if bool(rows.any()):
                self._blame(f"left logit {int(rows.nonzero()[0])} {what}")
        neutral = torch.ones(len(before), dtype=torch.bool, device=before.device)
        for name, column in self.inner.columns.items():
            neutral &= (given[name] == column.neutral).reshape(len(before), -1).all(-1)
        same = (scores == before) | (scores.isnan() & before.isnan())
        if bool((neutral & ~same.all(-1)).any()):
            at = int((neutral & ~same.all(-1)).nonzero()[0])
            self._blame(f"changed logit {at}, whose request asks for nothing")
        if self.inner.changes_argmax:
            return
        best = before.nan_to_num(nan=-torch.inf).argmax(-1, keepdim=True)
        moved = scores.gather(1, best)[:, 0] < scores.amax(-1)
        if bool(moved.any()):
            at = int(moved.nonzero()[0])
            self._blame(
                f"made another token of logit {at} the best, though changes_argmax is False"
            )

    def _blame(self, fault: str) -> NoReturn:
        """Raise PluginBroken that names the processor."""
        raise PluginBroken(
            f"the logits processor {self.name!r} {fault}; report it to its author or leave it "
            "out of logits_processors (--logits-processors)"
        )
