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
from often import often

from headstock import LLM, CannotRun, EngineConfig, EngineDied, SamplingParams
from headstock.engine.engine import Engine
from headstock.llm import get_session
from headstock.selection.auto_choices import FastestChoices
from headstock.startup.tuned_choices import (
    ArrivalTimes,
    TunedBucket,
    read_tuned_choices,
    write_tuned_choices,
)
from headstock_bench import bucket_tuning, tune_command, tuning
from headstock_bench.bucket_tuning import (
    MARGIN,
    Arrival,
    DecodingRow,
    StepSize,
    choose_graph_tokens,
    choose_sizes,
    compare_bucket,
    measure_buckets,
    time_arrivals,
    time_size,
)
from headstock_bench.conditions import read_conditions
from headstock_bench.tuning import Step
from headstock_bench.workloads import Prompts
from headstock_cuda_graph.runner import CudaGraphRunner

SIZES: dict[str, Any] = {
    "num_pages": 200,
    "page_size": 16,
    "max_running_requests": 4,
    "max_batch_tokens": 64,
    "ops": "torch",
}
GRAPHS: dict[str, Any] = {"attn": "sdpa-replayed", "runner": replayed_sdpa.RUNNER}
TIMES = ArrivalTimes(first_token=8.0, gap=2.0)


@pytest.fixture
def graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Settings of an engine of the demo model with graphs that a CPU makes; small measurements."""
    monkeypatch.setattr(tuning, "STEPS", {"cpu": (Step(tokens=16), Step(rows=4))})
    monkeypatch.setattr(tuning, "DECODE_CONTEXT", 16)
    monkeypatch.setattr(tuning, "DECODE_STEPS", 2)
    monkeypatch.setattr(bucket_tuning, "CONTEXT", 16)
    monkeypatch.setattr(bucket_tuning, "ROW_TOKENS", 400)
    monkeypatch.setattr(bucket_tuning, "RUNS", 2)
    folder = tmp_path / "plugins"
    folder.mkdir()
    with replayed_sdpa.installed(folder):
        yield {**SIZES, **GRAPHS}


def bucket(tokens: int, ratio: float) -> TunedBucket:
    """A size whose graph takes `ratio` of the time without it."""
    times = ArrivalTimes(first_token=8 * ratio, gap=2 * ratio)
    return TunedBucket(tokens=tokens, replayed=times, launched=TIMES)


def measure(**settings: Any) -> tuple[TunedBucket, ...]:
    """What `measure_buckets` finds of the demo model."""
    config = EngineConfig(tuned_choices=None, defer_graphs=False, **settings)
    return measure_buckets(config, lambda: None)


@pytest.mark.feature("V2")
@pytest.mark.parametrize(
    ("ratios", "most"),
    [
        ([], None),
        ([0.3, 0.5, 0.9], None),
        ([0.3, 0.5, 1.02], None),  # graphs are the default
        ([0.3, 0.5, 1.05], 32),
        ([0.3, 1.2, 0.9, 1.2], 16),  # 128 and 64 and 32 together are slower with graphs
        ([0.3, 1.2, 0.5, 1.2], 64),
        ([0.3, 1.2, 0.5, 1.0], None),
        ([1.1, 1.2, 1.1], 0),
    ],
)
def test_sizes_that_are_faster_without_lose_their_graphs(
    ratios: list[float], most: int | None
) -> None:
    buckets = [bucket(16 << at, ratio) for at, ratio in enumerate(ratios)]

    assert choose_graph_tokens(buckets) == most
    # What was not measured has no part in it.
    assert choose_graph_tokens([*buckets, TunedBucket(tokens=4096, refusal="no room")]) == most


@pytest.mark.parametrize(
    ("parts", "most"),
    [
        (("fa", "triton", "cudagraph"), 512),
        (("fi", "triton", "cudagraph"), None),
        (("fa", "torch", "cudagraph"), None),
        (("fa", "triton", "other"), None),
    ],
)
def test_a_size_holds_for_the_parts_that_it_was_measured_with(
    parts: tuple[str, str, str], most: int | None
) -> None:
    fastest = FastestChoices(attn="fa", ops="triton", runner="cudagraph", graph_tokens=512)

    assert fastest.find_graph_tokens(*parts) == most


@given(st.lists(st.floats(0.2, 5), min_size=1, max_size=8))
def test_graphs_are_lost_only_where_that_wins_the_margin(ratios: list[float]) -> None:
    buckets = [bucket(16 << at, ratio) for at, ratio in enumerate(ratios)]
    most = choose_graph_tokens(buckets)
    lost = [] if most is None else [each for each in buckets if each.tokens > most]
    won = 1.0
    for each in lost:
        won *= compare_bucket(each)

    assert most is None or won ** (1 / len(lost)) > 1 / (1 - MARGIN)


@given(st.floats(0.01, 100))
def test_a_size_is_as_fast_as_its_two_times_are_in_the_geometric_mean(ratio: float) -> None:
    first = evolve(bucket(16, 1.0), replayed=ArrivalTimes(first_token=8 * ratio, gap=2.0))
    gap = evolve(bucket(16, 1.0), replayed=ArrivalTimes(first_token=8.0, gap=2 * ratio))

    assert compare_bucket(bucket(16, ratio)) == pytest.approx(ratio)
    assert compare_bucket(first) == compare_bucket(gap) == pytest.approx(ratio**0.5)


def test_powers_of_two_and_all_large_sizes_are_measured_half_full() -> None:
    sizes = (2000, 1280, 1024, 896, 512, 448, 48, 32, 16)
    chosen = choose_sizes(sizes, 1600)

    assert [each.size for each in chosen] == [16, 32, 512, 1024, 1280, 2000]
    # Half way from the size below, but for full steps.
    assert [each.tokens for each in chosen] == [8, 24, 480, 960, 1152, 1600]
    # A step half way to a size that is far above the others is padded to none.
    assert choose_sizes((8192, 4096), 8192)[-1] == StepSize(size=8192, tokens=8192)


def test_a_gap_is_that_of_the_token_that_came_late() -> None:
    row = DecodingRow(times=[0.0, 5.0, 6.0, 8.5, 9.0])

    assert row.find_longest_gap(5.5) == 2.5
    assert row.find_longest_gap(4.0) == 5.0


class SlowPrompts:
    """An engine's streams: a token every few milliseconds, and none while a prompt is computed.

    Of the rows only one pauses.
    """

    def __init__(self) -> None:
        self._session = SimpleNamespace(engine=SimpleNamespace(stats=self.count_steps))
        self.pauses_until = 0.0
        self.tokens: list[int] = []
        self.prompts: list[list[int]] = []

    def count_steps(self) -> Any:
        """Each prompt was a step without a graph."""
        long = sum(len(prompt) == 99 for prompt in self.prompts)
        return SimpleNamespace(
            executed_steps=sum(self.tokens), replayed_steps=sum(self.tokens) - long
        )

    async def astream(self, prompt: list[int], params: SamplingParams) -> AsyncIterator[Any]:
        """The outputs of a request, each of one token; a prompt of 99 tokens delays a row."""
        piece = SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1])])
        self.prompts.append(prompt)
        if len(prompt) == 99:
            # The first prompt of all is slow, as one that compiles.
            pause = 1.0 if sum(len(each) == 99 for each in self.prompts) == 1 else 0.060
            self.pauses_until = time.perf_counter() + pause
            await asyncio.sleep(0.030)
            yield piece
            await asyncio.sleep(0.3)
            yield piece
            return
        number = len(self.tokens)
        self.tokens.append(0)
        for _ in range(params.max_tokens or 1):
            pause = self.pauses_until - time.perf_counter() if number else 0.0
            await asyncio.sleep(max(0.002, pause))
            self.tokens[number] += 1
            yield piece


def time_slow_prompts(slow: Any) -> list[Arrival]:
    """The arrivals of prompts of 99 tokens beside two rows."""
    return asyncio.run(time_arrivals(slow, 99, 2, Prompts(10**6), 20, 3000))


@pytest.mark.feature("V2")
@pytest.mark.full
def test_what_a_prompt_waits_and_what_rows_wait_for_it_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bucket_tuning, "RUNS", 2)
    slow = SlowPrompts()

    arrivals = time_slow_prompts(slow)

    # The longest of both rows' gaps, and the first of the prompt's two tokens. A busy machine makes
    # it longer, but not by so much as the first prompt, which does not count, or a second token.
    assert len(arrivals) == 2 and [each.num_launched for each in arrivals] == [1, 1]
    assert all(each.times.gap >= 57 for each in arrivals)
    assert min(each.times.gap for each in arrivals) < 900
    assert 29 <= min(each.times.first_token for each in arrivals) < 300
    # The rows have ended, though they might go on; no prompt is another's beginning.
    assert max(slow.tokens) < 3000
    assert len({tuple(prompt[:8]) for prompt in slow.prompts}) == len(slow.prompts) == 5


def test_an_error_of_a_row_is_raised() -> None:
    class Dead(SlowPrompts):
        async def astream(self, prompt: list[int], params: SamplingParams) -> AsyncIterator[Any]:
            raise EngineDied("gone")
            yield

    with pytest.raises(EngineDied, match="gone"):
        time_slow_prompts(Dead())


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int, bool]]:
    """The steps with prompt tokens of all engines, in order.

    Each has the rows that decode, their tokens, the prompts' tokens, and whether it was replayed.
    """
    seen: list[tuple[int, int, int, bool]] = []
    collect = Engine._collect_step

    def note_step(engine: Engine) -> Any:
        step = engine.in_flight[0]
        plan, pending = step.plan, step.pending
        lengths, decode = plan.stops - plan.starts, plan.num_decode
        if len(plan.rows) > decode:
            replayed = pending is not None and bool(pending.is_replayed)
            seen.append(
                (decode, int(lengths[:decode].sum()), int(lengths[decode:].sum()), replayed)
            )
        return collect(engine)

    monkeypatch.setattr(Engine, "_collect_step", note_step)
    return seen


@pytest.mark.feature("V2")
@pytest.mark.parametrize(
    "more",
    often(
        1,
        [
            {"max_itl_ms": 1.0, "proposer": "ngram", "scheduler": "prefill-first"},
            {},
            {"on_pressure": "reject", "memory_threshold": 0.01},
        ],
    ),
    ids=["chunks, drafts and prompts first", "defaults", "reject"],
)
def test_each_prompt_is_one_step_with_a_token_of_each_row(
    graphs: dict[str, Any], steps: list[tuple[int, int, int, bool]], more: dict[str, Any]
) -> None:
    found = measure(**{**graphs, "max_batch_tokens": 128, **more})

    assert [each.tokens for each in found] == [16, 32, 64, 128]
    assert all(each.replayed and each.launched for each in found)
    # 48 is a size too: steps of 64 have 56 tokens, 3 of them of rows. 128 is a full step.
    for tokens in (8, 24, 56, 128):
        replayed = [step[-1] for step in steps if step[:-1] == (3, 3, tokens - 3)]
        assert replayed == [True] * 3 + [False] * 3


@pytest.mark.full
def test_sizes_that_no_graph_serves_are_left_out_by_name(
    graphs: dict[str, Any],
    steps: list[tuple[int, int, int, bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CudaGraphRunner, "find_prompt_bucket", lambda *_: None)
    assert {each.refusal for each in measure(**graphs)} == {"no graph serves this step"}
    assert not any(replayed for *_, replayed in steps)


@pytest.mark.parametrize(
    ("more", "refusals"),
    often(
        2,
        [
            ({"num_pages": 12}, ["the KV pool holds 192 tokens, which is too few"] * 3),
            ({"max_running_requests": 1}, ["no row can decode with a prompt in one graph"] * 3),
            (
                {"max_seq_len": 54},
                ["", "", "this prompt is longer than a sequence of at most 54 tokens"],
            ),
            ({"cuda_graph_max_bs": 1}, ["no row can decode with a prompt in one graph"] * 3),
            ({"cuda_graph_max_bs": 3}, ["", "", ""]),
        ],
    ),
    ids=str,
)
def test_what_has_no_room_is_left_out_by_name(
    graphs: dict[str, Any], more: dict[str, Any], refusals: list[str]
) -> None:
    assert [each.refusal for each in measure(**{**graphs, **more})] == refusals


@pytest.mark.parametrize(("launched", "replays"), [(0, True), (1, False)])
def test_a_figure_is_the_median_of_its_arrivals(
    graphs: dict[str, Any], monkeypatch: pytest.MonkeyPatch, launched: int, replays: bool
) -> None:
    async def find_arrivals(*more: object) -> list[Arrival]:
        pairs = ((9.0, 1.0), (2.0, 7.0), (3.0, 2.0))
        times = [ArrivalTimes(first_token=first, gap=gap) for first, gap in pairs]
        return [Arrival(times=each, num_launched=launched) for each in times]

    monkeypatch.setattr(bucket_tuning, "time_arrivals", find_arrivals)
    with LLM("demo", **graphs) as llm:
        found = time_size(llm, StepSize(size=16, tokens=16), 3, replays=replays)

    assert found == ArrivalTimes(first_token=3.0, gap=2.0)


def test_rows_that_end_too_soon_give_no_figure(
    graphs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_tuning, "ROW_TOKENS", 3)

    assert {each.refusal for each in measure(**graphs)} == {"requests failed, or ended too soon"}


@pytest.mark.parametrize(
    "more",
    [
        {"cuda_graph_max_tokens": 32},
        {"attn": "sdpa", "runner": "eager"},
        {"kv_cache": False},
    ],
    ids=str,
)
def test_a_size_that_is_given_stays_and_without_graphs_none_is_measured(
    graphs: dict[str, Any], more: dict[str, Any]
) -> None:
    choices = tuning.tune(EngineConfig(**{**graphs, **more}))

    assert choices.buckets == () and choices.fastest.graph_tokens is None


def test_what_was_measured_before_is_kept_where_graphs_cannot_be(
    graphs: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*more: object) -> None:
        raise CannotRun("no memory")

    monkeypatch.setattr(bucket_tuning, "measure_buckets", fail)
    choices = tuning.tune(EngineConfig(**graphs))

    assert choices.fastest.ops == "torch" and choices.buckets == ()
    assert any("graphs are not measured" in each.getMessage() for each in caplog.records)


def test_the_fastest_choices_have_the_graphs_that_are_measured(
    graphs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[EngineConfig] = []

    def note_config(config: EngineConfig, *more: object) -> tuple[TunedBucket, ...]:
        asked.append(config)
        return ()

    monkeypatch.setattr(bucket_tuning, "measure_buckets", note_config)
    monkeypatch.setattr(
        tuning.operation_tuning, "tune_operations", lambda config, env: ("radix.unused=1",)
    )
    times = iter([2.0, 2.0, 1.0, 1.0, 0.9, 0.9])
    monkeypatch.setattr(tuning, "_time_step", lambda llm, step: next(times))
    monkeypatch.setattr(tuning, "_measure_candidate", measure_without_options)
    tuning.tune(EngineConfig(**{**graphs, "ops": "auto"}))

    assert [(each.ops, each.opt) for each in asked] == [("onednn", ("radix.unused=1",))]


MEASURE = tuning._measure_candidate


def measure_without_options(config: EngineConfig, *more: Any) -> Any:
    """Measures a candidate as if it had no options; refuses all but two sets of operations."""
    if config.ops not in ("auto", "onednn"):
        raise CannotRun("left out")
    return MEASURE(evolve(config, opt=()), *more)


def time_by_size(ratios: Mapping[int, float]) -> Any:
    """A `time_size` by which graphs take so many times as long."""

    def time_size(llm: LLM, step: StepSize, rows: int, *, replays: bool) -> ArrivalTimes | str:
        if step.size not in ratios:
            return "no room"
        ratio = ratios[step.size] if replays else 1.0
        return ArrivalTimes(first_token=8 * ratio, gap=2 * ratio)

    return time_size


@pytest.mark.feature("V2")
def test_graphs_are_measured_shown_kept_and_limited(
    graphs: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bucket_tuning, "time_size", time_by_size({16: 0.5, 64: 1.5}))
    kept = str(tmp_path / "kept")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in graphs.items()]
    flags += ["--tuned-choices", kept]

    assert tune_command.main(flags) == 0
    out, err = capsys.readouterr()
    assert "with and without graphs of --runner rerun" in err
    rows = [line.split() for line in out.splitlines() if line[:2] in ("16", "64")]
    assert rows == [
        ["16", "4.00", "1.00", "8.00", "2.00", "0.50"],
        ["64", "12.00", "3.00", "8.00", "2.00", "1.50"],
    ]
    assert "32 tokens were not measured: no room" in out
    assert out.rstrip().endswith("--ops torch --cuda-graph-max-tokens 16")

    assert tune_command.main([*flags, "--show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["fastest"]["graph_tokens"] == 16 and len(shown["buckets"]) == 3

    settings = {**graphs, "tuned_choices": kept}
    assert start(settings) == ((16,), True)
    everything = ((64, 48, 32, 16), False)
    assert start({**settings, "cuda_graph_max_tokens": 64}) == everything
    assert start({**settings, "tuned_choices": None}) == everything
    # With other parts launches take another time.
    assert start({**settings, "ops": "onednn"}) == everything
    assert start({**settings, "attn": "sdpa-replayed,sdpa-replayed"}) == ((16,), True)
    assert start({**settings, "runner": "eager"}) == ((), False)
    # Where nothing is replayed nothing is said of graphs.
    assert start({**settings, "debug_attention": True}) == ((), False)


def start(settings: Mapping[str, Any]) -> tuple[tuple[int, ...], bool]:
    """The sizes that an engine has graphs for, and whether it says that they were measured."""
    with LLM("demo", **settings) as llm:
        summary = get_session(llm).engine.summary
        conditions = read_conditions(llm, version="", shape="demo", weights="checkpoint")
    assert conditions.graph_tokens == max(summary.prompt_graphs, default=0)
    said = any("are faster without a graph" in note for note in summary.notes)
    return summary.prompt_graphs, said


@pytest.mark.full
def test_where_all_graphs_are_slower_there_is_none(
    graphs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_tuning, "time_size", time_by_size({16: 2.0, 32: 2.0, 64: 2.0}))
    settings = {**graphs, "tuned_choices": str(tmp_path / "kept")}
    path = write_tuned_choices(settings["tuned_choices"], tuning.tune(EngineConfig(**settings)))
    assert start(settings) == ((), True)

    content = json.loads(path.read_text())
    for value in (-5, "x", 3.5, True):
        content["fastest"]["graph_tokens"] = value
        path.write_text(json.dumps(content))
        assert read_tuned_choices(path) is None
    # A file of a version before buckets.
    content["fastest"] = {"attn": "sdpa-replayed", "ops": "torch"}
    path.write_text(json.dumps({**content, "buckets": []}))
    del content["buckets"]
    path.write_text(json.dumps(content))
    assert start(settings) == ((64, 48, 32, 16), False)
