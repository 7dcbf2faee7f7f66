"""What a runner is given: with a field of it changed, requests of an engine end otherwise."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import attrs
from rerun import RerunRunner
from torch import Tensor
from toy_engine import EngineHarness, installed, request
from toy_plugins import VOCAB

from headstock import SamplingParams
from headstock.errors import HeadstockError
from headstock.scheduler import Request
from headstock.spi import (
    AttentionBackend,
    DecodeAttention,
    LayerInfo,
    Ops,
    Program,
    RowTables,
    Sample,
    Step,
)
from headstock_cuda_graph.options import GraphOptions
from headstock_cuda_graph.runner import Bucket

from .vary import Case

WARM = SamplingParams(temperature=2.0)


class ChangedRunner(RerunRunner):
    """The runner of graphs, whose steps and program are changed before it sees them."""

    change: Callable[[Any], Any] = staticmethod(lambda record: record)

    def __init__(self, program: Program, options: GraphOptions) -> None:
        attention = type(self).change(program.attention)
        super().__init__(type(self).change(attrs.evolve(program, attention=attention)), options)

    def run(self, step: Step) -> Sample:
        """The changed step."""
        with self.noting_crashes():
            sample = super().run(type(self).change(step))
        type(self).replays += sample.is_replayed
        return sample

    def capture_bucket(self, lines: Tensor) -> Bucket:
        """The graphs of so many rows."""
        with self.noting_crashes():
            return super().capture_bucket(lines)

    replays = 0
    crashes: ClassVar[list[Exception]] = []

    @contextmanager
    def noting_crashes(self) -> Iterator[None]:
        """Note what code falls over; the assertions of the toy plugins are refusals."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, AssertionError):
                self.crashes.append(error)
            raise


class UncheckedHarness(EngineHarness):
    """A harness that takes any output."""

    def check_output(self, one: Request) -> None:
        """Nothing is wrong."""


def run(change: Callable[[Any], Any]) -> object:
    """How requests end in an engine whose runner sees changed records, and how often it replays."""
    crashes: list[Exception] = []
    changed = type(
        "Changed",
        (ChangedRunner,),
        {"change": staticmethod(change), "replays": 0, "crashes": crashes},
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        patch("tempfile.tempdir", folder),
        patch("rerun.RerunRunner", changed),
        installed(Path(folder)) as toys,
    ):
        try:
            # Some steps with prompt tokens are one graph, and some go in pieces.
            opt = ("rerun.whole_rows=2",)
            engine = toys.engine(
                window=9, runner="rerun", max_batch_tokens=12, overlap=False, opt=opt
            )
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
            assert not crashes, "that code falls over a value does not show that it honours it"
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


def shift_tokens(ops: Ops) -> Ops:
    """Operations that like the token after best."""
    other = copy(ops)
    other.final_norm = lambda *given: ops.final_norm(*given) + 1  # type: ignore[method-assign]
    return other


def lose_samples(tables: RowTables) -> RowTables:
    """Tables that keep other tokens than were sampled."""
    other = copy(tables)
    other.keep = lambda row_ids, positions, sample, scored=None: tables.keep(  # type: ignore[method-assign]
        row_ids, positions, attrs.evolve(sample, tokens=(sample.tokens + 1) % VOCAB), scored
    )
    return other


def see_nothing(backend: AttentionBackend) -> AttentionBackend:
    """A backend that finds nothing in the pool."""
    other = copy(backend)
    other.forward = lambda *given: given[3].zero_()  # type: ignore[method-assign]
    return other


def swap_groups(layers: Mapping[int, LayerInfo]) -> Mapping[int, LayerInfo]:
    """Layers that read the page table of the next group."""
    return {
        index: attrs.evolve(info, group=(info.group + 1) % len(layers))
        for index, info in layers.items()
    }


CASES: dict[str, Case] = {
    "Step.row_ids": changed(Step, row_ids=lambda step: step.row_ids[::-1].copy()),
    "Step.starts": changed(Step, starts=lambda step: step.starts - (step.num_decode > 0)),
    "Step.stops": changed(Step, stops=lambda step: step.stops + (step.num_decode == 0)),
    "Step.num_logits": changed(Step, num_logits=lambda step: step.stops - step.starts),
    "Step.is_sampled": changed(Step, is_sampled=lambda step: ~step.is_sampled),
    "Program.model": changed(
        Program,
        model=lambda program: attrs.evolve(
            program.model, forward=lambda *given: program.model.forward(*given) + 1
        ),
    ),
    "Program.ops": changed(Program, ops=lambda program: shift_tokens(program.ops)),
    "Program.config": changed(
        Program, config=lambda program: attrs.evolve(program.config, layers=())
    ),
    "Program.row_tables": changed(
        Program, row_tables=lambda program: lose_samples(program.row_tables)
    ),
    "Program.attention": changed(
        Program,
        attention=lambda program: attrs.evolve(
            program.attention, backend=see_nothing(program.attention.backend)
        ),
    ),
    "DecodeAttention.backend": changed(
        DecodeAttention, backend=lambda attention: see_nothing(attention.backend)
    ),
    "DecodeAttention.layers": changed(
        DecodeAttention, layers=lambda attention: swap_groups(attention.layers)
    ),
    "DecodeAttention.max_seq_len": changed(DecodeAttention, max_seq_len=lambda attention: 1),
}
