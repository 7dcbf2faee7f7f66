"""What a runner is given: with a field of it changed, requests of an engine end otherwise."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import attrs
from rerun import RerunRunner
from toy_engine import EngineHarness, installed, request

from headstock import SamplingParams
from headstock.errors import HeadstockError
from headstock.scheduler import Request
from headstock.spi import DecodeAttention, DecodeStep, Program, PromptStep, Sample, Sampling

from .vary import Case

WARM = SamplingParams(temperature=2.0)


class ChangedRunner(RerunRunner):
    """The runner of graphs, whose steps and program are changed before it sees them."""

    change: Callable[[Any], Any] = staticmethod(lambda record: record)

    def __init__(self, program: Program) -> None:
        attention = type(self).change(program.attention)
        super().__init__(type(self).change(attrs.evolve(program, attention=attention)))

    def decode(self, step: DecodeStep) -> Sample | None:
        """The replay of the changed step."""
        return self.count(super().decode(type(self).change(step)))

    def prompt(self, step: PromptStep) -> Sample | None:
        """The replay of the changed step."""
        return self.count(super().prompt(type(self).change(step)))

    replays = 0

    def count(self, sample: Sample | None) -> Sample | None:
        """The sample; replays are counted."""
        type(self).replays += sample is not None
        return sample


class UncheckedHarness(EngineHarness):
    """A harness that takes any output."""

    def check_output(self, one: Request) -> None:
        """Nothing is wrong."""


def run(change: Callable[[Any], Any]) -> object:
    """How requests end in an engine whose runner sees changed records, and how often it replays."""
    changed = type("Changed", (ChangedRunner,), {"change": staticmethod(change), "replays": 0})
    with (
        tempfile.TemporaryDirectory() as folder,
        patch("tempfile.tempdir", folder),
        patch("rerun.RerunRunner", changed),
        installed(Path(folder)) as toys,
    ):
        try:
            engine = toys.engine(runner="rerun", max_batch_tokens=12, overlap=False)
        except HeadstockError as error:
            return type(error).__name__, str(error).replace(folder, "")
        harness = UncheckedHarness(engine)
        try:
            harness.run(
                [
                    request("a", range(5), 4),
                    request("b", range(2, 16), 3),
                    *(
                        request(str(seed), [1], 4, params=attrs.evolve(WARM, seed=seed))
                        for seed in range(4)
                    ),
                ]
            )
        except AssertionError as error:
            return str(error)
        finally:
            engine.close()
        return harness.outputs, harness.reasons, changed.replays


UNCHANGED: list[object] = []


def changed(record: type, **changes: Callable[[Any], Any]) -> Case:
    """The case of a field of a record that a runner is given: made of the record."""

    def change(given: Any) -> Any:
        if not isinstance(given, record):
            return given
        return attrs.evolve(given, **{name: make(given) for name, make in changes.items()})

    def case() -> tuple[object, object]:
        if not UNCHANGED:
            UNCHANGED.append(run(lambda given: given))
        return UNCHANGED[0], run(change)

    return case


def cold() -> Sampling:
    """Settings that no row asked for."""
    return Sampling()


CASES: dict[str, Case] = {
    "DecodeStep.row_ids": changed(DecodeStep, row_ids=lambda step: step.row_ids[::-1].copy()),
    "DecodeStep.starts": changed(DecodeStep, starts=lambda step: step.starts - 1),
    "DecodeStep.query_len": changed(DecodeStep, query_len=lambda step: 2),
    "DecodeStep.kind": changed(DecodeStep, kind=lambda step: frozenset()),
    "DecodeStep.sampling": changed(DecodeStep, kind=lambda step: None, sampling=lambda step: cold),
    "PromptStep.row_ids": changed(PromptStep, row_ids=lambda step: step.row_ids[::-1].copy()),
    "PromptStep.starts": changed(PromptStep, starts=lambda step: step.starts - 1),
    "PromptStep.stops": changed(PromptStep, stops=lambda step: step.stops + 1),
    "PromptStep.is_sampled": changed(PromptStep, is_sampled=lambda step: ~step.is_sampled),
    "PromptStep.kind": changed(PromptStep, kind=lambda step: frozenset()),
    "PromptStep.sampling": changed(PromptStep, kind=lambda step: None, sampling=lambda step: cold),
    "PromptStep.attention": changed(
        PromptStep, attention=lambda step: lambda: lambda q, layer, out: out.zero_()
    ),
    "Program.model": changed(
        Program,
        model=lambda program: attrs.evolve(program.model, forward=lambda *given: given[2].tokens),
    ),
    "Program.ops": changed(Program, ops=lambda program: None),
    "Program.config": changed(
        Program, config=lambda program: attrs.evolve(program.config, layers=())
    ),
    "Program.row_tables": changed(Program, row_tables=lambda program: None),
    "Program.attention": changed(Program, attention=lambda program: None),
    "DecodeAttention.backend": changed(DecodeAttention, backend=lambda attention: None),
    "DecodeAttention.layers": changed(DecodeAttention, layers=lambda attention: {}),
    "DecodeAttention.max_seq_len": changed(DecodeAttention, max_seq_len=lambda attention: 1),
}
