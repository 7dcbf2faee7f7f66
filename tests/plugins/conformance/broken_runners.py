"""Runners that are wrong in one way each, operation by operation."""

from __future__ import annotations

from copy import copy
from typing import Any, ClassVar

import numpy as np
import torch
from attrs import evolve

from headstock.builtin.eager import EagerRunner
from headstock.spi import (
    CaptureProgress,
    Program,
    ReplayLimits,
    ReplaySizes,
    Sample,
    Step,
)


class StoresNothing(EagerRunner):
    """Leaves it to core to store tokens."""

    def __init__(self, program: Program) -> None:
        tables: Any = copy(program.row_tables)
        tables.keep = lambda *given: None
        super().__init__(evolve(program, row_tables=tables))


class StoresNeighbours(EagerRunner):
    """Stores each row's token in the next row of the step."""

    def __init__(self, program: Program) -> None:
        tables: Any = copy(program.row_tables)

        def keep(rows: Any, positions: Any, sample: Sample, scored: Any = None) -> None:
            program.row_tables.keep(
                rows, positions, evolve(sample, tokens=sample.tokens.roll(1)), scored
            )

        tables.keep = keep
        super().__init__(evolve(program, row_tables=tables))


class StoresInPrompts(EagerRunner):
    """Stores what every chunk of a prompt samples, over the prompt's next token."""

    def run(self, step: Step) -> Sample:
        return super().run(evolve(step, is_sampled=step.num_logits > 0))


class StoresOneDraft(EagerRunner):
    """Stores what the last draft samples, and nothing before it."""

    def run(self, step: Step) -> Sample:
        return super().run(evolve(step, num_drafts=None))


class SamplesOneEach(EagerRunner):
    """Samples no more than one token of a row, whatever its drafts are."""

    def run(self, step: Step) -> Sample:
        sample, rows = super().run(step), len(step.row_ids)
        return sample if step.num_drafts is None else sample.first(rows)


class DraftsForgotten(EagerRunner):
    """Lets the model guess nothing."""

    def run(self, step: Step) -> Sample:
        return evolve(super().run(step), make_drafts=None)


class DraftsOfNeighbours(EagerRunner):
    """Gives each row what is guessed for the next one."""

    def run(self, step: Step) -> Sample:
        sample = super().run(step)
        make = sample.make_drafts
        return sample if make is None else evolve(sample, make_drafts=lambda: make().roll(1, 0))


class DraftsUnverified(EagerRunner):
    """Says that it verified what the step sampled."""

    def run(self, step: Step) -> Sample:
        sample = super().run(step)
        return sample if sample.verified is None else evolve(sample, verified=sample.tokens)


class RowsSwapped(EagerRunner):
    """Gives the first two rows each other's tokens."""

    def run(self, step: Step) -> Sample:
        sample = super().run(step)
        if len(sample.tokens) < 2:
            return sample
        tokens = sample.tokens.clone()
        tokens[:2] = sample.tokens[:2].flip(0)
        return evolve(sample, tokens=tokens)


class RowsCut(EagerRunner):
    """Gives the seventeenth row and those after it the first one's token."""

    most = 16

    def run(self, step: Step) -> Sample:
        sample = super().run(step)
        tokens = sample.tokens.clone()
        tokens[self.most :] = tokens[:1]
        return evolve(sample, tokens=tokens)


class HundredsCut(RowsCut):
    """The same for rows from 256 on."""

    most = 256


class GroupsForgotten(EagerRunner):
    """Reads the pages of the first KV group in all layers."""

    def __init__(self, program: Program) -> None:
        layers: Any = program.attention.layers  # the router's too
        for index, layer in layers.items():
            layers[index] = evolve(layer, group=0)
        super().__init__(program)


class BusyForever(EagerRunner):
    """Takes it that every step ends."""

    is_busy = False

    def run(self, step: Step) -> Sample:
        if self.is_busy:
            raise RuntimeError("a step runs")
        self.is_busy = True
        sample = super().run(step)
        self.is_busy = False
        return sample


class PromptsFirst(EagerRunner):
    """Gives what prompts sample before what the decode rows beside them do."""

    def run(self, step: Step) -> Sample:
        sample = super().run(step)
        return evolve(sample, tokens=sample.tokens.roll(-step.num_decode))


class CountsItself(EagerRunner):
    """Counts how far each row is, and does not see that it has another request."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.lengths = np.zeros(64, np.int64)

    def run(self, step: Step) -> Sample:
        starts = step.starts
        if step.is_decode:
            starts = np.maximum(self.lengths[step.row_ids], starts)
        self.lengths[step.row_ids] = np.maximum(step.stops, self.lengths[step.row_ids])
        return super().run(evolve(step, starts=starts, stops=step.stops - step.starts + starts))


class DraftsBesideForgotten(EagerRunner):
    """Forgets to store what drafts sample where some row of the step has none."""

    def run(self, step: Step) -> Sample:
        if step.num_drafts is not None and not step.num_drafts.all():
            step = evolve(step, num_drafts=None)
        return super().run(step)


class RunsTwice(EagerRunner):
    """Runs each step to warm up, and again."""

    def run(self, step: Step) -> Sample:
        super().run(step)
        return super().run(step)


class OutputAsWideAsQueries(EagerRunner):
    """Takes it that attention gives as many numbers as a query has."""

    def __init__(self, program: Program) -> None:
        layers = {
            index: evolve(layer, out_dim=None) for index, layer in program.attention.layers.items()
        }
        super().__init__(evolve(program, attention=evolve(program.attention, layers=layers)))


class OrderForgotten(EagerRunner):
    """Gives what rows that share pages sample in the order of their groups."""

    def run(self, step: Step) -> Sample:
        return evolve(super().run(step), order=None)


class ScoresForgotten(EagerRunner):
    """Gives no log-probabilities."""

    def run(self, step: Step) -> Sample:
        return evolve(super().run(step), logprobs=None)


class ScoresOfOthers(EagerRunner):
    """Gives each position of a prompt the log-probability of the next."""

    def run(self, step: Step) -> Sample:
        sample = super().run(step)
        if sample.logprobs is None:
            return sample
        return evolve(sample, logprobs=sample.logprobs.roll(-1))


class AllHealthy(EagerRunner):
    """Calls every row sound."""

    def run(self, step: Step) -> Sample:
        sample = super().run(step)
        return evolve(sample, healthy=torch.ones_like(sample.healthy))


class GreedyAlone(EagerRunner):
    """Forgets temperatures."""

    def run(self, step: Step) -> Sample:
        names = ("temperature", "top_k", "top_p", "min_p", "seeds")
        return super().run(without_settings(step, *names))


class RepetitionForgotten(EagerRunner):
    """Forgets one of the penalties."""

    def run(self, step: Step) -> Sample:
        return super().run(without_settings(step, "repetition"))


class PresenceForgotten(EagerRunner):
    """Forgets one of the penalties."""

    def run(self, step: Step) -> Sample:
        return super().run(without_settings(step, "presence"))


class FrequencyForgotten(EagerRunner):
    """Forgets one of the penalties."""

    def run(self, step: Step) -> Sample:
        return super().run(without_settings(step, "frequency"))


class ProcessorsForgotten(EagerRunner):
    """Forgets what logits processors do."""

    def run(self, step: Step) -> Sample:
        return super().run(without_settings(step, "processing"))


def without_settings(step: Step, *names: str) -> Step:
    """The step, which makes settings without some."""
    other = copy(step)
    make = step.sampling
    object.__setattr__(
        other, "sampling", lambda *given: evolve(make(*given), **dict.fromkeys(names))
    )
    return other


class MasksForgotten(EagerRunner):
    """Samples before the host has filled masks."""

    def run(self, step: Step) -> Sample:
        return super().run(without_settings(step, "mask"))


class ChunksPooled(EagerRunner):
    """Pools the last chunk of a prompt alone."""

    def run(self, step: Step) -> Sample:
        sample = super().run(step)
        if sample.pooled is None:
            return sample
        pooling = step.batch().pooling
        assert pooling is not None
        later = torch.from_numpy(step.starts.copy())[pooling.rows] > 0
        return evolve(sample, pooled=sample.pooled * torch.where(later, 0.5, 1.0)[:, None])


class TablesWritten(EagerRunner):
    """Ends a row's page table where the row ends."""

    def run(self, step: Step) -> Sample:
        sample = super().run(step)
        tables: Any = self.program.row_tables
        tables.buffers.page_tables[0][int(step.row_ids[0]), -1] = 0
        return sample


class KeysCopied(EagerRunner):
    """Keeps a copy of the first row's keys in another row's page."""

    def run(self, step: Step) -> Sample:
        sample = super().run(step)
        tables: Any = self.program.row_tables
        first, others = int(step.row_ids[0]), set(range(20)) - set(step.row_ids.tolist())
        pages = tables.buffers.page_tables[0]
        if others and pages[min(others), 0]:
            keys = tables.buffers.kv[0].k
            keys[pages[min(others), 0]] = keys[pages[first, 0]]
        return sample


class WeightsWritten(EagerRunner):
    """Scales a weight in place."""

    def run(self, step: Step) -> Sample:
        next(iter(self.program.params.values())).tensor.mul_(1.0001)
        return super().run(step)


class SamplesKept(EagerRunner):
    """Remembers all that it sampled."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.samples: list[Sample] = []

    def run(self, step: Step) -> Sample:
        self.samples.append(super().run(step))
        return self.samples[-1]


class LastProgramAlone(EagerRunner):
    """Has one program for all runners."""

    programs: ClassVar[list[Program]] = []

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.programs.append(program)

    def run(self, step: Step) -> Sample:
        self.program = self.programs[-1]
        return super().run(step)


class CallsItReplay(EagerRunner):
    """Calls every step a replay."""

    def run(self, step: Step) -> Sample:
        return super().run(step).replayed()


class PromisesReplays(EagerRunner):
    """Says that it has replays, and has none."""

    def prepare(self, limits: ReplayLimits, report: CaptureProgress) -> ReplaySizes:
        return ReplaySizes(rows=(4, 2, 1) if limits.max_rows >= 4 else ())


class SizesUpwards(EagerRunner):
    """Gives its sizes from the smallest on."""

    def prepare(self, limits: ReplayLimits, report: CaptureProgress) -> ReplaySizes:
        return ReplaySizes(rows=(1, 2, 4) if limits.max_rows >= 4 else ())
