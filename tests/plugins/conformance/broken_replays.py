"""Runners whose replays are wrong in one way each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np
from attrs import evolve
from rerun import RerunRunner
from torch import Tensor

from headstock.spi import (
    CaptureProgress,
    Planning,
    Program,
    ReplayLimits,
    ReplaySizes,
    RowTables,
    Sample,
    Step,
)
from headstock_cuda_graph.options import GraphOptions


class MasksLate(RerunRunner):
    """Replays the sampler before the host has filled masks."""

    def replay(self, step: Step) -> Sample | None:
        other = copy(step)
        object.__setattr__(other, "prepare_sampling", lambda: None)
        sample = super().replay(other)
        step.prepare_sampling()
        return sample


class DraftsKept(RerunRunner):
    """Says that a replay verified what the one before it did."""

    kept: Tensor | None = None

    def run(self, step: Step) -> Sample:
        sample = super().run(step)
        found, old = sample.verified, self.kept
        if found is None or not sample.is_replayed:
            return sample
        self.kept = found.clone()
        return sample if old is None or len(old) != len(found) else evolve(sample, verified=old)


class AnswersFromPrepare(RerunRunner):
    """Gives what its graph sampled when it was captured."""

    def replay_rows(self, step: Step) -> Sample | None:
        count = len(step.row_ids)
        bucket = self.find_bucket("rows", count, count)
        if bucket is None or not step.is_sampled.all():
            return None
        return next(iter(bucket.samplers.values())).result.first(count).replayed()


class LengthsStale(RerunRunner):
    """Replays the positions of the step before where the rows are the same."""

    last: tuple[Any, Any] = (None, None)

    def replay_rows(self, step: Step) -> Sample | None:
        rows, starts = self.last
        self.last = step.row_ids, step.starts
        if rows is not None and np.array_equal(rows, step.row_ids):
            step = evolve(step, starts=starts)
        return super().replay_rows(step)


class PlansStale(RerunRunner):
    """Never brings a plan of a graph up to date that attention makes on the host."""

    def __init__(self, program: Program, options: GraphOptions) -> None:
        attention = program.attention
        if attention.planning is Planning.PER_STEP:
            backend: Any = copy(attention.backend)
            backend.graph_update = lambda plan, step: None
            program = evolve(program, attention=evolve(attention, backend=backend))
        super().__init__(program, options)


def pad_with_row(tables: RowTables) -> RowTables:
    """The tables, whose padding row is row 0."""
    other = copy(tables)
    other.__class__ = type("RowZeroPads", (type(tables),), {"padding_row": 0})
    return other


class PreparesWithRow(RerunRunner):
    """Pads with row 0 in place of the padding row, in captures too."""

    def __init__(self, program: Program, options: GraphOptions) -> None:
        super().__init__(evolve(program, row_tables=pad_with_row(program.row_tables)), options)


class PadsWithRow(RerunRunner):
    """Captures with the padding row, and pads steps with row 0."""

    def replay_rows(self, step: Step) -> Sample | None:
        program = self.program
        self.program = evolve(program, row_tables=pad_with_row(program.row_tables))
        try:
            return super().replay_rows(step)
        finally:
            self.program = program


class DraftsUnordered(RerunRunner):
    """Forgets which logits of padded drafts are the step's own."""

    def replay_verification(self, step: Step) -> Sample | None:
        sample = super().replay_verification(step)
        return None if sample is None else evolve(sample, order=None)


class ChunksStored(RerunRunner):
    """Stores what chunks of prompts sample in steps that are replayed."""

    def replay_prompts(self, step: Step) -> Sample | None:
        return super().replay_prompts(evolve(step, is_sampled=step.num_logits > 0))


class ReplaysGreedy(RerunRunner):
    """Replays the sampler of greedy rows for all."""

    def replay(self, step: Step) -> Sample | None:
        other, kind = copy(step), step.kind()
        object.__setattr__(other, "kind", lambda *given: None if kind is None else frozenset())
        return super().replay(other)


class ReplaysOldGroups(RerunRunner):
    """Gives what rows that share pages sample in the order of their groups."""

    def replay_rows(self, step: Step) -> Sample | None:
        sample = super().replay_rows(step)
        return None if sample is None else evolve(sample, order=None)


class KeepsReplaysAfterErrors(RerunRunner):
    """Goes on with what was made before `prepare` raised."""

    @contextmanager
    def drop_graphs_after_errors(self) -> Iterator[None]:
        yield


class KeepsOldSizes(RerunRunner):
    """Adds to what was made before."""

    def drop_graphs(self) -> None:
        pass


class NeverDone(RerunRunner):
    """Makes replays later, though it may not."""

    def prepare(self, limits: ReplayLimits, report: CaptureProgress) -> ReplaySizes:
        return super().prepare(evolve(limits, may_defer=True), report)


class CountsUp(RerunRunner):
    """Never gets to the last of its sizes."""

    def prepare_next(self) -> int:
        return super().prepare_next() + 1


class KeepsGraphs(RerunRunner):
    """Frees nothing of what it captured."""

    def close(self) -> None:
        pass
