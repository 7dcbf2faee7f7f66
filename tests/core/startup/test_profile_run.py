"""What graphs are expected to take, by a capture of them all."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from attrs import define, field
from replayed_sdpa import OwnDeltaOps

from headstock import LLM
from headstock.config import EngineConfig
from headstock.nn import penalties
from headstock.nn.penalties import token_counts
from headstock.ops.bound import BoundOps
from headstock.spi import (
    CaptureProgress,
    LayerConfig,
    ModelConfig,
    Ops,
    ReplayLimits,
    ReplaySizes,
    Runner,
    Sampling,
)
from headstock.startup import build, graph_captures
from headstock.startup.assemble import AssembledExecutor, assemble_executor
from headstock.startup.graph_captures import (
    LateCaptures,
    measure_graph_bytes,
    replay_limits,
    try_capture,
)
from headstock.startup.profile_run import measure_memory_use
from headstock_conformance.ops.models import make_delta_config

SIZES = (32, 24, 16, 8, 4, 2, 1)
PIECE = 40
FULL = (256, 4096, 8192)
"""The default limits: rows, tokens, and tokens of full steps."""


@define
class Device:
    """A runner whose graphs share 1,000 bytes and take 10 more and 2 a row each, on a device that
    gives memory out in pieces; a library takes 500 at the first capture of all, and a backend keeps
    16 for every size it has seen.
    """

    captured: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()
    seen: set[int] = field(factory=set)
    fails: bool = False
    later: list[int] = field(factory=list)

    def prepare(self, limits: ReplayLimits, report: CaptureProgress) -> ReplaySizes:
        self.captured = self.prompts = ()
        rows = tuple(size for size in SIZES if size <= limits.max_rows)
        tokens = tuple(size for size in (64, 16) if size <= limits.max_tokens)
        if self.fails and rows:
            raise RuntimeError("no")
        now = rows[:1] if limits.may_defer else rows
        self.captured, self.prompts = now, tokens
        self.later = [*rows[len(now) :]]
        self.seen |= {*now}
        for number, _ in enumerate(now, start=1):
            report(number, len(rows))
        return ReplaySizes(rows=rows, tokens=tokens, num_left=len(self.later))

    def prepare_next(self) -> int:
        self.captured += (self.later.pop(),)
        self.seen |= {*self.captured}
        return len(self.later)

    def free(self) -> int:
        graphs = (
            1000 * bool(self.captured)
            + sum(10 + 2 * size for size in self.captured)
            + 7 * sum(self.prompts)
        )
        return (
            50_000
            - 500 * bool(self.seen)
            - sum(-(-used // PIECE) * PIECE for used in (graphs, 16 * len(self.seen)))
        )


def runner_of(device: Device) -> Runner:
    """The device as a runner."""
    return cast("Runner", device)


@pytest.mark.feature("G10")
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 32])
def test_the_plan_counts_what_all_graphs_take_and_what_backends_keep_for_each(
    rows: int,
) -> None:
    device = Device()
    limits = ReplayLimits(max_rows=rows, max_tokens=100)
    assert try_capture(runner_of(device), limits) and not device.captured
    before = device.free()

    expected = measure_graph_bytes(runner_of(device), limits, device.free)

    assert device.captured == tuple(size for size in SIZES if size <= rows)
    assert device.prompts == (64, 16)
    assert expected == before - device.free() > 0


@pytest.mark.feature("G10")
def test_graphs_that_will_be_deferred_are_measured_in_the_order_of_their_captures() -> None:
    device, reports = Device(), list[tuple[int, int]]()
    before = device.free()
    limits = ReplayLimits(max_rows=8, max_tokens=64, may_defer=True)

    expected = measure_graph_bytes(
        runner_of(device), limits, device.free, lambda *counts: reports.append(counts)
    )

    assert device.captured == (8, 1, 2, 4) and expected == before - device.free() > 0
    assert reports == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.feature("G10")
@pytest.mark.parametrize(("taken", "is_told"), [(168 << 20, False), (170 << 20, True)])
def test_late_captures_that_took_more_than_planned_are_told_once_all_are_done(
    taken: int, is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = [2, 1, 0]
    monkeypatch.setattr(graph_captures, "count_settled_bytes", lambda: (1 << 30) - taken)
    late = LateCaptures(torch.device("cuda"), planned=100 << 20, free_before=1 << 30)
    executor: Any = SimpleNamespace(prepare_next=lambda: left.pop(0))
    with caplog.at_level(logging.WARNING, "headstock"):
        while not late.is_done:
            assert not caplog.records
            late.prepare_next(executor)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * is_told
    assert not left


def test_a_runner_whose_late_capture_raises_is_asked_for_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    late = LateCaptures(torch.device("cpu"))
    executor: Any = SimpleNamespace(prepare_next=Mock(side_effect=MemoryError("none is left")))
    with caplog.at_level(logging.WARNING, "headstock"):
        late.prepare_next(executor)
    assert late.is_done and "MemoryError: none is left" in caplog.messages[0]


@pytest.mark.feature("G10")
def test_no_buckets_take_nothing_and_a_failed_capture_counts_for_nothing() -> None:
    device, limits = Device(), ReplayLimits(max_rows=8)
    assert measure_graph_bytes(runner_of(device), ReplayLimits(), device.free) == 0
    failing = Device(fails=True)
    assert measure_graph_bytes(runner_of(failing), limits, failing.free) == 0
    assert not try_capture(runner_of(failing), limits)


def test_a_runner_that_says_no_sizes_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Mute(Device):
        def prepare(self, limits: ReplayLimits, report: CaptureProgress) -> Any:
            return None

    with caplog.at_level(logging.WARNING, "headstock"):
        assert not try_capture(runner_of(Mute()), ReplayLimits(max_rows=8))
    assert "Mute.prepare: expected ReplaySizes, got " in caplog.messages[0]


def make_inputs(config: EngineConfig, operations: Ops | None = None) -> Any:
    """What an executor with these operations is built from."""
    return SimpleNamespace(config=config, parts=SimpleNamespace(operations=operations))


@pytest.mark.parametrize(
    ("settings", "limits"),
    [
        ({}, FULL),
        ({"max_batch_tokens": 5000}, (256, 4096, 5000)),
        ({"max_batch_tokens": 300}, (256, 300, 300)),
        ({"cuda_graph_max_tokens": 2048}, (256, 2048, 0)),
        ({"cuda_graph_max_tokens": 0}, (256, 0, 0)),
        ({"cuda_graph_max_bs": 8}, (8, 4096, 8192)),
        ({"cuda_graph_max_bs": 0}, (0, 0, 0)),
        ({"debug_ops": True}, (0, 0, 0)),
    ],
)
def test_full_steps_have_a_graph_beside_the_short_ones(
    settings: dict[str, Any], limits: tuple[int, int, int]
) -> None:
    assembled: Any = SimpleNamespace(watch=None)
    found = replay_limits(make_inputs(EngineConfig(**settings)), assembled)
    assert (found.max_rows, found.max_tokens, found.full_tokens) == limits


class DeltaOps(OwnDeltaOps):
    """The delta rule of the first `taken` layers alone is the set's own."""

    taken = 0

    def takes(self, operation: str, config: ModelConfig, layer: LayerConfig | None) -> bool:
        return layer is not None and layer.index < self.taken


@pytest.mark.parametrize(("taken", "limits"), [(0, (256, 0, 0)), (1, (256, 0, 0)), (9, FULL)])
def test_prompts_of_delta_rules_have_graphs_where_the_operations_take_all_of_them(
    taken: int, limits: tuple[int, int, int]
) -> None:
    ops, assembled = DeltaOps(), cast("AssembledExecutor", SimpleNamespace(watch=None))
    ops.taken = taken
    inputs = make_inputs(EngineConfig(), BoundOps("own", ops, make_delta_config()))

    found = replay_limits(inputs, assembled)

    assert (found.max_rows, found.max_tokens, found.full_tokens) == limits


@pytest.mark.parametrize(
    ("is_deferred", "watch", "expected"),
    [(True, None, True), (False, None, False), (True, object(), False)],
)
def test_graphs_are_deferred_unless_told_otherwise_or_steps_are_watched(
    is_deferred: bool, watch: object, expected: bool
) -> None:
    inputs = make_inputs(EngineConfig(defer_graphs=is_deferred))
    assembled: Any = SimpleNamespace(watch=watch)
    assert replay_limits(inputs, assembled).may_defer == expected


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that always has as many bytes free."""
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    for name in ("memory_reserved", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 1 << 30))


@pytest.mark.feature("T18")
def test_the_worst_step_has_a_row_as_long_as_any_and_the_tables_are_counted(
    counters: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def record_call(*parts: Any) -> AssembledExecutor:
        calls.append(parts)
        return assemble_executor(*parts)

    monkeypatch.setattr(build, "assemble_executor", record_call)
    histories: list[tuple[int, ...]] = []

    def counted(logits: torch.Tensor, sampling: Sampling) -> Any:
        assert sampling.history is not None
        histories.append(tuple(sampling.history.shape))
        return token_counts(logits, sampling)

    with LLM("demo", max_running_requests=4, num_pages=300, max_seq_len=1024, max_batch_tokens=64):
        (inputs, buffers, max_len) = calls[0]
        monkeypatch.setattr(penalties, "token_counts", counted)
        memory_use = measure_memory_use(inputs, lambda: buffers, max_len)

    assert histories == [(4, 1024)]
    assert memory_use.workspaces == sum(
        tensor.nbytes for tensor in (buffers.tokens, *buffers.page_tables)
    )
