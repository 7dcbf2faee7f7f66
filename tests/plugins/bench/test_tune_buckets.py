"""Graphs of steps with prompts, timed beside rows that decode and chosen by it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import replayed_sdpa
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from headstock import LLM, EngineConfig, EngineDied, SamplingParams
from headstock.llm import get_session
from headstock.startup.tuned_choices import ArrivalTimes, TunedBucket, write_tuned_choices
from headstock_bench import bucket_tuning, tune_command, tuning
from headstock_bench.bucket_tuning import (
    DecodingRow,
    choose_graph_tokens,
    choose_sizes,
    compare_bucket,
    time_arrivals,
    time_sizes,
)
from headstock_bench.tuning import Step
from headstock_bench.workloads import Prompts

SIZES = {"num_pages": 200, "page_size": 16, "max_running_requests": 4, "max_batch_tokens": 64}
GRAPHS = {"attn": "sdpa-replayed", "runner": replayed_sdpa.RUNNER}


@pytest.fixture
def graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mapping[str, Any]]:
    """Settings of an engine of the demo model with graphs that a CPU makes; small measurements."""
    monkeypatch.setattr(tuning, "STEPS", {"cpu": (Step(tokens=16), Step(rows=4))})
    monkeypatch.setattr(tuning, "DECODE_CONTEXT", 16)
    monkeypatch.setattr(tuning, "DECODE_STEPS", 2)
    monkeypatch.setattr(bucket_tuning, "CONTEXT", 16)
    monkeypatch.setattr(bucket_tuning, "ROW_TOKENS", 96)
    monkeypatch.setattr(bucket_tuning, "RUNS", 1)
    folder = tmp_path / "plugins"
    folder.mkdir()
    with replayed_sdpa.installed(folder):
        yield {**SIZES, **GRAPHS}


def bucket(tokens: int, ratio: float) -> TunedBucket:
    """A size whose graph takes `ratio` of the time without it."""
    return TunedBucket(
        tokens=tokens,
        replayed=ArrivalTimes(first_token=4 * ratio, gap=2 * ratio),
        launched=ArrivalTimes(first_token=4.0, gap=2.0),
    )


@pytest.mark.feature("V2")
@pytest.mark.parametrize(
    ("ratios", "most"),
    [
        ([], None),
        ([0.3, 0.5, 0.9], None),  # as without a measurement: all sizes, and full steps
        ([0.3, 0.5, 0.98], 32),
        ([0.3, 1.0, 0.9, 1.0], 64),
        ([1.0, 0.98, 1.1], 0),
    ],
)
def test_the_largest_size_with_a_faster_graph_is_chosen(
    ratios: list[float], most: int | None
) -> None:
    buckets = [bucket(16 << at, ratio) for at, ratio in enumerate(ratios)]

    assert choose_graph_tokens(buckets) == most


@given(st.floats(0.01, 100))
def test_a_size_is_as_fast_as_its_two_times_are_in_the_geometric_mean(ratio: float) -> None:
    first = evolve(bucket(16, 1.0), replayed=ArrivalTimes(first_token=4 * ratio, gap=2.0))
    gap = evolve(bucket(16, 1.0), replayed=ArrivalTimes(first_token=4.0, gap=2 * ratio))

    assert compare_bucket(bucket(16, ratio)) == pytest.approx(ratio)
    assert compare_bucket(first) == compare_bucket(gap) == pytest.approx(ratio**0.5)


def test_powers_of_two_and_all_large_sizes_are_measured() -> None:
    sizes = (4096, 3584, 1280, 1024, 896, 512, 48, 16)

    assert choose_sizes(sizes) == [16, 512, 1024, 1280, 3584, 4096]


def test_a_gap_is_that_of_the_token_that_came_late() -> None:
    row = DecodingRow(times=[0.0, 5.0, 6.0, 8.5, 9.0])

    assert row.find_longest_gap(5.5) == 2.5
    assert row.find_longest_gap(4.0) == 5.0


class SlowPrompts:
    """An engine's streams: a token every few milliseconds, and none while a prompt is computed."""

    def __init__(self, prompt_seconds: float, pause_seconds: float) -> None:
        self.prompt_seconds, self.pause_seconds = prompt_seconds, pause_seconds
        self.pauses_until = 0.0
        self.ended = 0

    async def astream(self, prompt: list[int], params: SamplingParams) -> AsyncIterator[Any]:
        """The outputs of a request, each of one token; a prompt of 99 tokens delays all others."""
        piece = SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1])])
        if len(prompt) == 99:
            self.pauses_until = time.perf_counter() + self.pause_seconds
            await asyncio.sleep(self.prompt_seconds)
            yield piece
            return
        try:
            for _ in range(params.max_tokens or 1):
                await asyncio.sleep(max(0.002, self.pauses_until - time.perf_counter()))
                yield piece
        finally:
            self.ended += 1


@pytest.mark.feature("V2")
def test_what_a_prompt_waits_and_what_rows_wait_for_it_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bucket_tuning, "RUNS", 2)
    slow: Any = SlowPrompts(0.030, 0.060)

    times = asyncio.run(time_arrivals(slow, 99, 2, Prompts(100)))

    # Bounds from below alone: a busy machine makes all of it longer.
    assert times is not None and times.first_token >= 29 and times.gap >= 57
    assert slow.ended == 2  # the rows do not go on


def test_an_error_of_a_row_is_raised() -> None:
    class Dead(SlowPrompts):
        async def astream(self, prompt: list[int], params: SamplingParams) -> AsyncIterator[Any]:
            raise EngineDied("gone")
            yield

    dead: Any = Dead(0.0, 0.0)
    with pytest.raises(EngineDied, match="gone"):
        asyncio.run(time_arrivals(dead, 99, 2, Prompts(100)))


@pytest.mark.feature("V2")
def test_prompts_are_timed_beside_rows_and_leave_an_engine_that_goes_on(
    graphs: Mapping[str, Any],
) -> None:
    with LLM("demo", **graphs) as llm:
        found = time_sizes(llm, [16, 64], 64)
        (answer,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1))

    assert set(found) == {16, 64}
    assert all(times.first_token > 0 and times.gap > 0 for times in found.values())
    assert len(answer.outputs[0].token_ids) == 1


def test_sizes_without_room_are_left_out(graphs: Mapping[str, Any]) -> None:
    with LLM("demo", **graphs) as llm:
        assert set(time_sizes(llm, [2, 16, 32, 4096], 4096)) == {16, 32}
    for small in ({"num_pages": 12}, {"max_seq_len": 100}, {"max_running_requests": 1}):
        with LLM("demo", **{**graphs, **small}) as llm:
            assert time_sizes(llm, [16, 32], 64) == {}


def test_a_full_step_is_one_step_where_its_size_has_room_for_more(
    graphs: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []

    async def note_length(llm: LLM, length: int, rows: int, prompts: Prompts) -> ArrivalTimes:
        lengths.append((length, rows))
        return ArrivalTimes(first_token=1.0, gap=1.0)

    monkeypatch.setattr(bucket_tuning, "time_arrivals", note_length)
    with LLM("demo", **{**graphs, "max_batch_tokens": 60}) as llm:
        sizes = get_session(llm).engine.summary.prompt_graphs
        time_sizes(llm, sizes, 60)

    assert sizes == (64, 48, 32, 16) and lengths == [(57, 3), (45, 3), (29, 3), (13, 3)]


def test_rows_that_end_too_soon_give_no_figure(
    graphs: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_tuning, "ROW_TOKENS", 3)
    with LLM("demo", **graphs) as llm:
        assert time_sizes(llm, [16], 64) == {}


@pytest.mark.parametrize(
    "more", [{"cuda_graph_max_tokens": 32}, {"attn": "sdpa", "runner": "eager"}], ids=str
)
def test_a_size_that_is_given_stays_and_without_graphs_none_is_measured(
    graphs: Mapping[str, Any], more: Mapping[str, Any]
) -> None:
    choices = tuning.tune(EngineConfig(**{**graphs, "ops": "torch", **more}))

    assert choices.buckets == () and choices.fastest.graph_tokens is None


@pytest.mark.feature("V2")
def test_graphs_are_measured_shown_kept_and_limited(
    graphs: Mapping[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    slow = {64: 1.0, 32: 0.5, 16: 0.5}

    def time_by_size(llm: LLM, sizes: list[int], most: int) -> dict[int, ArrivalTimes]:
        has_graphs = bool(get_session(llm).engine.summary.prompt_graphs)
        asked.append((has_graphs, sizes))
        ratio = slow if has_graphs else dict.fromkeys(slow, 1.0)
        return {size: ArrivalTimes(first_token=8 * ratio[size], gap=ratio[size]) for size in sizes}

    asked: list[tuple[bool, list[int]]] = []
    monkeypatch.setattr(bucket_tuning, "time_sizes", time_by_size)
    kept = str(tmp_path / "kept")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in graphs.items()]
    flags += ["--tuned-choices", kept, "--ops", "torch"]

    assert tune_command.main(flags) == 0
    out, err = capsys.readouterr()
    assert asked == [(True, [16, 32, 64]), (False, [16, 32, 64])]
    assert "with graphs of --runner rerun and without" in err
    rows = [line.split() for line in out.splitlines() if line[:2] in ("16", "32", "64")]
    assert rows == [
        ["16", "4.00", "0.50", "8.00", "1.00", "0.50"],
        ["32", "4.00", "0.50", "8.00", "1.00", "0.50"],
        ["64", "8.00", "1.00", "8.00", "1.00", "1.00"],
    ]
    assert out.rstrip().endswith("--ops torch --cuda-graph-max-tokens 32")

    assert tune_command.main([*flags, "--show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["fastest"]["graph_tokens"] == 32 and len(shown["buckets"]) == 3

    settings = {**graphs, "tuned_choices": kept, "ops": "torch"}
    assert start(settings) == ((32, 16), True)
    assert start({**settings, "cuda_graph_max_tokens": 64}) == ((64, 48, 32, 16), False)
    # Measured with other parts, whose launches take another time.
    assert start({**settings, "ops": "onednn"}) == ((64, 48, 32, 16), False)
    assert start({**settings, "tuned_choices": None}) == ((64, 48, 32, 16), False)


def test_where_no_graph_is_faster_there_is_none(
    graphs: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_tuning, "compare_bucket", lambda bucket: 1.0)
    settings = {**graphs, "tuned_choices": str(tmp_path / "kept"), "ops": "torch"}
    choices = tuning.tune(EngineConfig(**settings))
    write_tuned_choices(settings["tuned_choices"], choices)

    assert [each.tokens for each in choices.buckets] == [16, 32, 64]
    with LLM("demo", **settings) as llm:
        summary = get_session(llm).engine.summary
    assert summary.prompt_graphs == ()
    assert any("found no faster graph of a step with prompts" in note for note in summary.notes)


def start(settings: Mapping[str, Any]) -> tuple[tuple[int, ...], bool]:
    """The sizes that an engine has graphs for, and whether it says that they were measured."""
    with LLM("demo", **settings) as llm:
        engine = get_session(llm).engine
        said = any("found graphs faster up to there" in note for note in engine.summary.notes)
        return engine.summary.prompt_graphs, said
