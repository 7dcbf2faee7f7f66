"""Replayed steps with prompt tokens: the same tokens, whatever pads them, whoever decodes beside
them.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from often import often
from rerun import RerunCapturer
from torch import Tensor
from toy_engine import EngineHarness, Toys, random_requests, request

from headstock import SamplingParams
from headstock.engine.engine import Engine
from headstock.spi import Collectives, Sample, Step
from headstock_cuda_graph import prompt_graphs
from headstock_cuda_graph.prompt_graphs import PromptBucket, WholeGraph
from headstock_cuda_graph.runner import CudaGraphRunner

BACKENDS = ("toy", "toy-planned", "toy,toy-planned")
MODES = sorted(
    product(range(len(BACKENDS)), (True, False), (50, 300)),
    key=lambda mode: ((mode[0] + mode[1] + (mode[2] == 50)) % 2, -mode[0]),
)
"""Backend, overlap and budget; each two values of them meet in the first half. The first one has
whole graphs and graphs in pieces."""


def runner_of(engine: Engine) -> CudaGraphRunner:
    """The engine's runner."""
    executor: Any = engine.executor
    while not hasattr(executor, "runner"):
        executor = executor.inner
    return getattr(executor.runner, "inner", executor.runner)


def watch(engine: Engine) -> Counter[str]:
    """Counts steps with prompt tokens by whether they are replayed, and which of them decode rows
    share.
    """
    runner, counts = runner_of(engine), Counter[str]()
    replay = runner.replay_prompts

    def counted(step: Step) -> Sample | None:
        sample = replay(step)
        counts["eager" if sample is None else "replayed"] += 1
        if sample is not None:
            prompts: Any = runner.prompts
            bucket = runner.find_prompt_bucket(len(step.row_ids), step.num_tokens)
            is_whole = prompts.whole_for(bucket, step) is not None
            counts["whole" if is_whole else "in pieces"] += 1
            counts["whole, mixed"] += is_whole and step.num_decode > 0
        if sample is not None:
            assert len(sample.tokens) == len(sample.healthy) == len(step.row_ids)
            counts["mixed"] += step.num_decode > 0
            counts["chunks"] += not step.is_sampled.all()
        return sample

    runner.replay_prompts = counted  # type: ignore[method-assign]
    return counts


def list_wholes(engine: Engine, size: int) -> list[tuple[int, int]]:
    """The most rows and the longest context of each whole graph of a size."""
    bucket = runner_of(engine).buckets.of_kind("prompt")[size]
    return [(whole.rows, whole.longest) for whole in bucket.wholes]


def note_wholes(engine: Engine) -> list[tuple[int, int]]:
    """The same of each whole graph that is chosen from now on."""
    prompts, seen = runner_of(engine).prompts, []
    assert prompts is not None
    choose = prompts.whole_for

    def chosen(bucket: PromptBucket, step: Step) -> WholeGraph | None:
        whole = choose(bucket, step)
        if whole is not None:
            seen.append((whole.rows, whole.longest))
        return whole

    prompts.whole_for = chosen  # type: ignore[method-assign]
    return seen


@pytest.mark.feature("G2", "V6")
@pytest.mark.parametrize(("backend", "overlap", "budget"), often(1, MODES))
def test_replayed_prompts_give_the_tokens_of_eager_ones(
    toys: Toys, backend: int, overlap: bool, budget: int
) -> None:
    attn, requests = BACKENDS[backend], random_requests(np.random.default_rng(8), 60)
    sizes: dict[str, Any] = {
        "max_running_requests": 17,
        "max_batch_tokens": budget,
        "num_pages": 300,
        "overlap": overlap,
    }
    outputs = []
    for runner in ("eager", "rerun"):
        opt = ("rerun.short_context=24",) if runner == "rerun" else ()
        engine = toys.engine(attn=attn, runner=runner, debug_canary=True, opt=opt, **sizes)
        counts = watch(engine) if runner == "rerun" else None
        harness = EngineHarness(engine).run(requests)
        outputs.append((harness.outputs, harness.reasons))
        engine.close()
        if counts is not None:
            assert (
                counts["replayed"] > 5 and counts["mixed"] and (counts["chunks"] or budget == 300)
            )
            # Whole: no step; all; those without decode rows, which are another backend's.
            whole, mixed = counts["whole"], counts["whole, mixed"]
            assert (whole > 0) == (attn != "toy-planned") and (mixed > 0) == (attn == "toy")
            assert (counts["in pieces"] > 1) == (attn != "toy")

    assert outputs[0] == outputs[1]


@pytest.mark.feature("S9")
@pytest.mark.parametrize(("most", "replayed"), [(0, set()), (32, {"a"}), (48, {"a", "b"})])
def test_only_steps_within_the_largest_token_count_are_replayed(
    toys: Toys, most: int, replayed: set[str]
) -> None:
    engine = toys.engine(runner="rerun", cuda_graph_max_tokens=most)
    counts = watch(engine)
    for name, first, length in (("a", 0, 32), ("b", 3, 33)):
        before = counts["replayed"]
        EngineHarness(engine).run([request(name, range(first, first + length), 3)])
        assert counts["replayed"] - before == (name in replayed)

    assert max(runner_of(engine).buckets.of_kind("prompt"), default=0) == most
    engine.close()


@pytest.mark.feature("V6")
def test_full_steps_are_replayed_and_those_that_would_be_padded_far_are_not(
    toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden: list[float] = []

    def note(capturer: RerunCapturer, work: object, most_hidden: float) -> bool:
        hidden.append(most_hidden)
        return True

    monkeypatch.setattr(RerunCapturer, "is_worthwhile", note)
    sizes = {"max_batch_tokens": 4640, "num_pages": 1500, "max_running_requests": 9}
    sizes["max_seq_len"] = 700
    # Unbounded: whether steps are short for streams is no matter here.
    settings: dict[str, Any] = {"runner": "rerun", "cache_type": "naive", "max_itl_ms": None}
    engine = toys.engine(overlap=False, **settings, **sizes)
    prompts = runner_of(engine).prompts
    assert prompts is not None
    captured = runner_of(engine).buckets.of_kind("prompt")
    assert hidden == [4.0] * len(captured) and list(captured)[-3:] == [3584, 4096, 4640]
    replayed = []
    for count in (4640, 4128, 4127, 4097, 4096, 2176):
        counts = watch(engine)
        lengths = [count // 9] * 8 + [count - count // 9 * 8]
        EngineHarness(engine).run(
            [request(f"{count} {i}", np.arange(n) % 50, 1) for i, n in enumerate(lengths)]
        )
        replayed.append(counts["replayed"])
    assert replayed == [1, 1, 0, 0, 1, 1]
    engine.close()


@pytest.mark.feature("S19", "V6")
@pytest.mark.parametrize("ours", [True, False])
def test_ranks_capture_what_rank_0_finds_worthwhile(
    toys: Toys, monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    class Second(Collectives):
        index, count = 1, 2

        def all_gather(self, x: Tensor) -> Tensor:
            return torch.cat([torch.tensor([float(not ours)]), x])

    engine = toys.engine(runner="rerun", cuda_graph_max_tokens=32)
    prompts = runner_of(engine).prompts
    assert prompts is not None
    monkeypatch.setattr(RerunCapturer, "is_worthwhile", lambda *_: ours)
    monkeypatch.setattr(prompts.program.ops, "collectives", Second())
    monkeypatch.setattr(prompts.program.ops, "all_gather", Second().all_gather)

    work: Any = None
    assert prompts.is_worthwhile(work, torch.device("cpu")) is not ours
    engine.close()


@pytest.mark.feature("V6")
def test_full_steps_of_many_rows_are_not_one_graph(toys: Toys) -> None:
    sizes = {"max_batch_tokens": 4640, "num_pages": 1500, "max_running_requests": 32}
    engine = toys.engine(runner="rerun", cache_type="naive", overlap=False, **sizes)
    prompts = runner_of(engine).prompts
    assert prompts is not None
    assert list_wholes(engine, 4096) == [(16, 160), (32, 160)]
    assert list_wholes(engine, 4640) == [(16, 160)]
    engine.close()


@pytest.mark.feature("V6")
def test_short_contexts_have_a_graph_of_their_own(toys: Toys) -> None:
    opt, sizes = ("rerun.short_context=24",), {"max_batch_tokens": 16, "max_running_requests": 16}
    engine = toys.engine(runner="rerun", overlap=False, opt=opt, **sizes)
    most, prompts = engine.config.max_seq_len, runner_of(engine).prompts
    assert prompts is not None
    assert list_wholes(engine, 16) == [(16, 24), (16, most)]
    seen = note_wholes(engine)
    EngineHarness(engine).run([request("a", range(40), 1)])

    assert seen == [(16, 24), (16, most), (16, most)]  # 16, 32 and 40 tokens
    engine.close()


@pytest.mark.feature("V6")
def test_all_kinds_of_whole_graphs_of_a_size(toys: Toys) -> None:
    opt, sizes = ("rerun.short_context=24",), {"max_batch_tokens": 64, "max_running_requests": 32}
    engine = toys.engine(runner="rerun", cache_type="naive", overlap=False, opt=opt, **sizes)
    most = engine.config.max_seq_len
    kinds = [(16, 24), (32, 24), (32, most)]
    assert list_wholes(engine, 64) == kinds
    for kind, count, length in ((0, 16, 2), (1, 20, 3), (2, 1, 60), (2, 2, 25), (0, 2, 24)):
        seen = note_wholes(engine)
        EngineHarness(engine).run(
            [request(f"{i}", [(i + j) % 50 for j in range(length)], 1) for i in range(count)]
        )
        assert seen == [kinds[kind]]
    engine.close()


@pytest.mark.feature("V6")
@pytest.mark.parametrize(("decoding", "prompt"), often(1, [(8, 32), (30, 8)]))
@pytest.mark.parametrize(("context", "whole"), [(31, 0), (32, 1)])
def test_contexts_in_larger_steps_with_decode_rows_have_a_limit(
    toys: Toys,
    monkeypatch: pytest.MonkeyPatch,
    decoding: int,
    prompt: int,
    context: int,
    whole: int,
) -> None:
    for most in (0, 48):  # as small as the steps of a toy
        monkeypatch.setattr(prompt_graphs, "FEW_TOKENS", most)
        opt = (f"rerun.mixed_context={context}",)
        engine = toys.engine(runner="rerun", max_batch_tokens=40, overlap=False, opt=opt)
        harness = EngineHarness(engine)
        harness.submit(request("a", range(decoding), 20))
        harness.step()
        harness.step()
        counts = watch(engine)
        harness.submit(request("b", range(10, 10 + prompt), 1))
        harness.step()
        harness.step()  # beside the second token that the first row decodes

        assert (counts["mixed"], counts["whole, mixed"]) == (1, whole or most == 48)
        harness.drain()
        engine.close()


@pytest.mark.feature("V6")
def test_contexts_in_larger_steps_without_decode_rows_have_no_limit(
    toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_graphs, "FEW_TOKENS", 0)
    opt = ("rerun.short_context=8", "rerun.mixed_context=8")
    engine = toys.engine(runner="rerun", max_batch_tokens=16, overlap=False, opt=opt)
    seen = note_wholes(engine)
    EngineHarness(engine).run([request("a", range(40), 1)])

    assert seen == [(8, engine.config.max_seq_len)] * 3
    engine.close()


@pytest.mark.feature("V6")
def test_steps_go_in_pieces_where_another_backend_attends_for_decode_rows(toys: Toys) -> None:
    sizes = {"max_batch_tokens": 64, "max_running_requests": 32, "num_pages": 300}
    engine = toys.engine(attn="toy,toy-planned", runner="rerun", **sizes)
    counts, prompts = watch(engine), runner_of(engine).prompts
    assert prompts is not None and {rows for rows, _ in list_wholes(engine, 64)} == {16}
    EngineHarness(engine).run(random_requests(np.random.default_rng(8), 20))
    engine.close()

    assert counts["whole"] > 0 and counts["mixed"] > 1
    assert counts["whole, mixed"] == 0


@pytest.mark.feature("V6")
def test_decode_rows_are_in_one_graph_with_prompts(toys: Toys) -> None:
    engine = toys.engine(runner="rerun", max_batch_tokens=50, num_pages=300)
    counts = watch(engine)
    EngineHarness(engine).run(random_requests(np.random.default_rng(8), 20))
    engine.close()

    assert counts["mixed"] > 1 and counts["whole"] > counts["whole, mixed"]
    assert counts["whole, mixed"] == counts["mixed"]


@pytest.mark.feature("V6")
@pytest.mark.parametrize(
    ("rows", "graphs", "whole"),
    [(0, set(), {}), (2, {2}, {1: True, 2: True, 3: False}), (20, {16, 20}, {3: True, 20: True})],
)
def test_steps_of_few_enough_rows_are_one_graph(
    toys: Toys, rows: int, graphs: set[int], whole: dict[int, bool]
) -> None:
    opt = (f"rerun.whole_rows={rows}",)
    sizes = {"max_batch_tokens": 64, "max_running_requests": 32}
    engine = toys.engine(runner="rerun", cache_type="naive", overlap=False, opt=opt, **sizes)
    prompts = runner_of(engine).prompts
    assert prompts is not None and {rows for rows, _ in list_wholes(engine, 64)} == graphs
    for count in whole or (1, 3):
        counts = watch(engine)
        EngineHarness(engine).run([request(f"{count} {i}", [i, 1, 2], 1) for i in range(count)])
        replayed = Counter({"whole": 1} if whole.get(count) else {"in pieces": 1})
        assert counts["replayed"] == 1
        assert {kind: counts[kind] for kind in ("whole", "in pieces")} == {
            "whole": replayed["whole"],
            "in pieces": replayed["in pieces"],
        }
    engine.close()


def test_the_summary_says_how_many_token_counts_are_captured(toys: Toys) -> None:
    engine = toys.engine(runner="rerun", max_batch_tokens=64)
    assert any("and 4 token counts up to 64" in note for note in engine.summary.notes), (
        engine.summary.notes
    )
    # Prompts beside decode rows are cut to these.
    assert engine.pacer.graph_sizes == (64, 48, 32, 16)
    engine.close()


def test_numbers_that_are_left_where_padding_reads_do_not_reach_the_dummy_page(toys: Toys) -> None:
    engine = toys.engine(runner="rerun", debug_canary=True)
    prompts = runner_of(engine).prompts
    assert prompts is not None and prompts.outputs
    with torch.inference_mode():
        for left in prompts.outputs.values():
            left.fill_(math.nan)
    harness = EngineHarness(engine).run([request("a", range(1, 20), 5)])

    (out,) = prompts.outputs.values()
    assert out[:32].isfinite().all() and harness.reasons == {"a": "length"}
    engine.close()


@pytest.mark.feature("G11")
@pytest.mark.parametrize("fault", ["execute@1", "wait@1", "nan@1:1"])
def test_a_prompt_step_that_fails_after_launch_fails_its_requests_alone(
    toys: Toys, fault: str
) -> None:
    engine = toys.engine(runner="rerun", faults=(fault,), overlap=False)
    harness = EngineHarness(engine)
    for i in range(3):
        harness.submit(request(str(i), range(1, 9), 4))
    harness.drain()
    wanted = {"error": 1, "length": 2} if fault.startswith("nan") else {"error": 3}
    assert Counter(harness.reasons.values()) == wanted

    EngineHarness(engine).run([request(str(i), range(1, 9), 4) for i in range(4)])
    engine.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"logprobs": 2},
        {"frequency_penalty": 0.9},
        {"logit_bias": {3: 9.0}},
        {"temperature": 0.9, "seed": 3},
    ],
)
def test_first_tokens_follow_their_settings(toys: Toys, settings: dict[str, Any]) -> None:
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 6} | settings))
    requests = [request(str(i), range(1, 9 + i), 6, params=params) for i in range(3)]
    answers = []
    for runner in ("eager", "rerun"):
        engine = toys.engine(runner=runner)
        counts = watch(engine) if runner == "rerun" else Counter(replayed=1)
        answers.append(EngineHarness(engine).run(requests).outputs)
        assert counts["replayed"]
        engine.close()

    assert answers[0] == answers[1]


def test_more_rows_than_the_largest_batch_size_run_eagerly(toys: Toys) -> None:
    engine = toys.engine(runner="rerun", cuda_graph_max_bs=2, max_running_requests=8)
    counts = watch(engine)
    EngineHarness(engine).run([request(str(i), range(10 * i, 10 * i + 9), 4) for i in range(3)])
    assert counts["eager"] == 1 and not counts["replayed"]
    EngineHarness(engine).run(
        [request(str(i), range(10 * i + 5, 10 * i + 14), 4) for i in range(2)]
    )
    assert counts["eager"] == counts["replayed"] == 1
    engine.close()
