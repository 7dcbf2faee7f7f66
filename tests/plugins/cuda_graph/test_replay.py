"""Replayed decode steps: the same tokens, from the right graphs, whatever fails."""

from __future__ import annotations

import logging
import re
from collections import Counter
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from often import often
from rerun import capture
from toy_engine import EngineHarness, Toys, random_requests, request

from headstock import SamplingParams
from headstock.engine.engine import Engine
from headstock.errors import CannotRun
from headstock.spi import Phase, Sample, Step
from headstock_cuda_graph.buckets import row_buckets, token_buckets


def replaying(toys: Toys, **settings: Any) -> Engine:
    """An engine that replays."""
    return toys.engine(**({"runner": "rerun"} | settings))


def watch(engine: Engine) -> Counter[int | None]:
    """Counts replays of decode steps by bucket, and under None those that were none."""
    runner = getattr(engine.executor, "inner", engine.executor).runner
    counts: Counter[int | None] = Counter()
    replay = runner.replay_rows

    def counted(step: Step) -> Sample | None:
        sample: Sample | None = replay(step)
        assert sample is None or len(sample.tokens) == len(sample.healthy) == len(step.row_ids)
        sizes = [size for size in runner.buckets.of_kind("rows") if size >= len(step.row_ids)]
        counts[min(sizes) if sample is not None else None] += 1
        return sample

    runner.replay_rows = counted
    return counts


@pytest.mark.feature("G2")
@pytest.mark.parametrize(
    ("attn", "overlap", "window"),
    often(
        1,
        [
            ("toy,toy-planned", True, 7),
            ("toy-planned", False, None),
            ("toy", True, None),
            ("toy-planned", True, None),
            ("toy", False, None),
            ("toy,toy-planned", False, None),
            ("toy", True, 7),
            ("toy-planned", False, 7),
        ],
    ),
)
def test_replayed_steps_give_the_tokens_of_eager_ones(
    toys: Toys, attn: str, overlap: bool, window: int | None
) -> None:
    requests = random_requests(np.random.default_rng(5), 60)
    sizes = {
        "max_running_requests": 17,
        "max_batch_tokens": 50,
        "num_pages": 300,
        "overlap": overlap,
    }
    outputs = []
    for runner in ("eager", "rerun"):
        engine = toys.engine(attn=attn, runner=runner, window=window, **sizes)
        counts = watch(engine) if runner == "rerun" else Counter({1: 1})
        harness = EngineHarness(engine).run(requests)
        outputs.append((harness.outputs, harness.reasons))
        assert sum(counts.values()) - counts[None] > 0
        engine.close()

    assert outputs[0] == outputs[1]


@pytest.mark.feature("G3", "G5", "G7", "S9")
def test_only_decode_steps_within_the_largest_bucket_are_replayed(toys: Toys) -> None:
    engine = replaying(toys, cuda_graph_max_bs=4, max_running_requests=8)
    counts = watch(engine)
    EngineHarness(engine).run([request(str(i), range(1, 10), 12) for i in range(6)])

    assert counts[None] > 0, "six rows are too many for a bucket of four"
    EngineHarness(engine).run([request(str(i), range(1, 10), 12 + 3 * i) for i in range(4)])
    assert counts[4] and counts[1] and counts[2]
    stats = engine.stats()
    # those with prompt tokens, for which there are graphs too
    others = stats.executed_steps - sum(counts.values())
    assert others > 0
    assert 0 <= stats.replayed_steps - (sum(counts.values()) - counts[None]) <= others
    engine.close()


@pytest.mark.feature("S9")
def test_steps_with_prompt_tokens_are_not_offered_as_decode_steps(toys: Toys) -> None:
    engine = replaying(toys, max_batch_tokens=8, overlap=False)
    counts = watch(engine)
    harness = EngineHarness(engine)
    harness.submit(request("a", range(1, 10), 30))
    for _ in range(4):
        harness.step()
    before = sum(counts.values())
    harness.submit(request("b", range(1, 49), 2))
    harness.step()
    harness.step()

    assert sum(counts.values()) == before + 1  # the step planned before "b" came
    harness.drain()
    engine.close()


@pytest.mark.feature("G6")
def test_other_values_never_make_a_new_graph(toys: Toys) -> None:
    engine = replaying(toys)
    runner = getattr(engine.executor, "inner", engine.executor).runner
    before = {
        size: (id(each), set(each.samplers))
        for size, each in runner.buckets.of_kind("rows").items()
    }
    addresses = [each.inputs.data_ptr() for each in runner.buckets.of_kind("rows").values()]
    EngineHarness(engine).run([request(str(i), range(1, 5 + 6 * i), 25) for i in range(8)])

    assert {
        size: (id(each), set(each.samplers))
        for size, each in runner.buckets.of_kind("rows").items()
    } == before
    assert [each.inputs.data_ptr() for each in runner.buckets.of_kind("rows").values()] == addresses
    engine.close()


@pytest.mark.feature("G8")
def test_the_first_step_of_a_kind_of_sampling_is_answered_and_the_kind_captured(
    toys: Toys,
) -> None:
    engine = replaying(toys, max_running_requests=1)
    runner = getattr(engine.executor, "inner", engine.executor).runner
    truncated = SamplingParams(temperature=0.8, top_k=3, seed=4, max_tokens=9)
    harness = EngineHarness(engine).run([request("a", range(1, 9), 9, params=truncated)])
    eager = EngineHarness(toys.engine(max_running_requests=1)).run(
        [request("a", range(1, 9), 9, params=truncated)]
    )

    assert harness.outputs == eager.outputs
    assert [sorted(kind) for kind in runner.buckets.of_kind("rows")[1].samplers][2:] == [
        ["min_p", "temperature", "top_k", "top_p"]
    ]
    engine.close()


@pytest.mark.parametrize(
    "settings", [{"logprobs": 2}, {"frequency_penalty": 0.9}, {"logit_bias": {3: 9.0}}]
)
def test_settings_that_no_graph_samples_by_are_sampled_after_the_replay(
    toys: Toys, settings: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, **settings)
    answers = []
    for runner in ("eager", "rerun"):
        engine = toys.engine(runner=runner, max_running_requests=3)
        counts = watch(engine) if runner == "rerun" else Counter({1: 1})
        answers.append(
            EngineHarness(engine).run(
                [request(str(i), range(1, 9 + i), 20, params=params) for i in range(3)]
            )
        )
        assert set(counts) != {None}
        engine.close()

    assert answers[0].outputs == answers[1].outputs


@pytest.mark.feature("G11")
def test_a_capture_that_fails_turns_graphs_off_with_one_warning(
    toys: Toys, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "headstock"):
        engine = replaying(toys, faults=("capture",))
    (warning,) = caplog.records
    assert "graphs are off" in warning.getMessage() and "capture" in warning.getMessage()
    assert any("graphs are off" in note for note in engine.summary.notes)

    EngineHarness(engine).run([request(str(i), range(1, 9), 12) for i in range(4)])
    assert not engine.executor.inner.runner.inner.buckets.of_kind("rows")
    engine.close()


@pytest.mark.feature("G11")
def test_a_capture_that_fails_midway_leaves_nothing_to_replay(
    toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = count()

    def fail(work: Any, *, warm: bool) -> Any:
        if next(graphs) == 4:  # in the second bucket
            raise RuntimeError("out of memory")
        return capture(work, warm=warm)

    monkeypatch.setattr("rerun.capture", fail)
    engine = replaying(toys)
    counts = watch(engine)
    requests = [request(str(i), range(1, 9), 12) for i in range(4)]
    harness = EngineHarness(engine).run(requests)

    assert next(graphs) == 5 and set(counts) == {None}
    assert any("graphs are off" in note for note in engine.summary.notes)
    assert harness.outputs == EngineHarness(toys.engine()).run(requests).outputs
    engine.close()


@pytest.mark.feature("G11")
@pytest.mark.parametrize("fault", ["execute@6", "wait@6", "nan@6:1"])
def test_a_step_that_fails_after_launch_fails_its_requests_alone(toys: Toys, fault: str) -> None:
    engine = replaying(toys, faults=(fault,))
    harness = EngineHarness(engine)
    for i in range(3):
        harness.submit(request(str(i), range(1, 9), 12))
    harness.drain()
    wanted = {"error": 1, "length": 2} if fault.startswith("nan") else {"error": 3}
    assert Counter(harness.reasons.values()) == wanted

    EngineHarness(engine).run([request(str(i), range(1, 9), 12) for i in range(4)])
    engine.close()


@pytest.mark.feature("S7")
def test_a_limit_of_one_captures_one_row_alone(toys: Toys) -> None:
    engine = replaying(toys, cuda_graph_max_bs=1)
    runner = getattr(engine.executor, "inner", engine.executor).runner

    assert list(runner.buckets.of_kind("rows")) == [1]
    assert any("graphs for 1 batch size" in note for note in engine.summary.notes)
    engine.close()


@pytest.mark.feature("S7")
def test_a_limit_of_none_runs_eagerly(toys: Toys) -> None:
    with pytest.raises(
        CannotRun, match=r"cuda_graph_max_bs \(--cuda-graph-max-bs\) 0 turns graphs off"
    ):
        replaying(toys, cuda_graph_max_bs=0)
    engine = toys.engine(runner="auto", cuda_graph_max_bs=0)
    assert engine.summary.runner == "eager"
    engine.close()


@pytest.mark.feature("G10")
@given(st.integers(1, 4096))
def test_buckets_are_few_and_never_much_too_large(most: int) -> None:
    sizes = row_buckets(most)

    assert list(sizes) == sorted(set(sizes), reverse=True) and sizes[0] == most and sizes[-1] == 1
    assert len(sizes) <= 12 + most // 16
    for rows in range(1, most + 1):
        padded = min(size for size in sizes if size >= rows)
        assert padded - rows <= (7 if rows <= 64 else 15)


@pytest.mark.feature("G10")
@given(st.integers(1, 20_000))
def test_token_buckets_are_few_and_never_much_too_large(most: int) -> None:
    sizes = token_buckets(most)

    assert list(sizes) == sorted(set(sizes), reverse=True) and sizes[0] >= most
    assert all(size % 16 == 0 for size in sizes) and len(sizes) <= 4 * most.bit_length()
    for tokens in (*range(1, min(most, 300) + 1), *range(300, most + 1, 97)):
        padded = min(size for size in sizes if size >= tokens)
        assert padded - tokens <= max(31, min(tokens / 4, 511))


def test_no_rows_no_buckets() -> None:
    assert row_buckets(0) == token_buckets(0) == ()


def test_a_kind_of_sampling_that_cannot_be_captured_is_computed_each_time(
    toys: Toys, caplog: pytest.LogCaptureFixture
) -> None:
    engine = replaying(toys, max_running_requests=2)
    runner = getattr(engine.executor, "inner", engine.executor).runner

    def refuse(work: Any, *, warm: bool) -> Any:
        raise RuntimeError("not in a graph")

    runner.sampling.capturer = refuse
    truncated = SamplingParams(temperature=0.8, top_p=0.7, seed=4, max_tokens=9)
    requests = [request(str(i), range(1, 9), 9, params=truncated) for i in range(2)]
    with caplog.at_level(logging.WARNING, "headstock"):
        harness = EngineHarness(engine).run(requests)

    assert (
        harness.outputs == EngineHarness(toys.engine(max_running_requests=2)).run(requests).outputs
    )
    (warning,) = caplog.records
    assert "top_p is not captured: not in a graph" in warning.getMessage()
    engine.close()


def test_captures_are_reported_one_by_one_with_the_memory_that_is_free(toys: Toys) -> None:
    told: list[tuple[str, int, int]] = []
    toys.engine(
        runner="rerun", max_running_requests=4, report=lambda *news: told.append(news)
    ).close()
    graphs = [news for news in told if news[0].startswith("graphs")]
    total = len(row_buckets(4)) + len(token_buckets(64))
    assert [done for _, done, _ in graphs] == [*range(1, total + 1)] and {
        news[2] for news in graphs
    } == {total}
    assert all(re.fullmatch(r"graphs, [\d.]+ (MiB|GiB) free", stage) for stage, *_ in graphs)


@pytest.mark.feature("G6", "S9")
def test_the_smallest_bucket_with_room_is_replayed(toys: Toys) -> None:
    engine = replaying(toys, max_running_requests=9)
    runner = getattr(engine.executor, "inner", engine.executor).runner
    used: list[tuple[int, int]] = []
    replay = runner.replay_rows

    def noted(step: Step) -> Sample | None:
        count = len(step.row_ids)
        used.append((count, runner.find_bucket("rows", count, count).size))
        return replay(step)  # type: ignore[no-any-return]

    runner.replay_rows = noted
    EngineHarness(engine).run([request(str(i), range(1, 10), 12 + 3 * i) for i in range(9)])

    assert {size for _, size in used} == {9, 8, 4, 2, 1}
    assert all(
        size == min(each for each in runner.buckets.of_kind("rows") if each >= rows)
        for rows, size in used
    )
    engine.close()


@pytest.mark.feature("G3", "S9")
def test_a_decode_backend_without_graphs_is_refused_by_name(toys: Toys) -> None:
    with pytest.raises(
        CannotRun, match=r"runner \(--runner\) rerun needs graph support DECODE .*'sdpa' has NEVER"
    ):
        replaying(toys, attn="toy,sdpa")


@pytest.mark.feature("S13")
def test_a_mixed_step_is_shared_out_by_phase(toys: Toys) -> None:
    engine = toys.engine(attn="toy,toy-planned", overlap=False)
    router = getattr(engine.executor, "inner", engine.executor).steps.router
    served: dict[str, set[Phase]] = {"prefill": set(), "decode": set()}
    for name, phases in served.items():
        # The plugin's own backend: the one around it, which checks its calls, has its own plans.
        backend = getattr(router, name).inner

        def forward(
            q: Any,
            layer: Any,
            plan: Any,
            out: Any,
            lse: Any = None,
            *,
            phases: set[Phase] = phases,
            told: Any = backend.forward,
        ) -> None:
            phases.add(plan.phase)
            told(q, layer, plan, out, lse)

        backend.forward = forward
    harness = EngineHarness(engine)
    harness.submit(request("a", range(1, 10), 30))
    harness.step()
    harness.submit(request("b", range(20, 30), 30))
    harness.drain()

    assert router.prefill is not router.decode
    assert (
        served["decode"] == {Phase.DECODE}
        and served["prefill"]
        and Phase.DECODE not in served["prefill"]
    )
    engine.close()
