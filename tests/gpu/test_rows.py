"""Rows of tests/features.md that a GPU alone can show, on the demo model; skipped where there is
none.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fault_injection import FaultInjector
from gpu import graphs
from gpu.tokens import NAMES, command, questions

from headstock import LLM, SamplingParams
from headstock.cli.process import EXPANDABLE
from headstock.config import EngineConfig
from headstock.engine.engine import Engine
from headstock.errors import CannotRun
from headstock.scheduler import Request
from headstock_bench.model_shapes import MODEL_SHAPES, write_model_directory
from headstock_fa.backend import FlashAttentionBackend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

SIZES: dict[str, Any] = {
    "device": "cuda",
    "num_pages": 2048,
    "max_seq_len": 2048,
    "max_running_requests": 32,
    "defer_graphs": False,
}
EIGHT_BITS = ("fi", "fa", "fa,fi", "fi,trtllm")
GREEDY = SamplingParams(temperature=0, max_tokens=16)


def wrong(llm: LLM, asked: dict[str, str]) -> list[str]:
    """The answers that are not right."""
    outputs = llm.generate(list(asked), GREEDY)
    told = [
        (output.outputs[0].text, right)
        for output, right in zip(outputs, asked.values(), strict=True)
    ]
    return [f"{text!r} for {right!r}" for text, right in told if not text.startswith(right)]


@pytest.mark.feature("S16", "S17")
@pytest.mark.parametrize("attn", ["fa,fi", "fi", "fa", "trtllm"])
def test_radix_hits_on_a_shared_prefix_and_naive_never_and_both_are_right(
    attn: str,
) -> None:
    # One of the two prefixes.
    begin = f"Remember: the number of the boat of {NAMES[0]}"
    shared = {prompt: right for prompt, right in questions().items() if prompt.startswith(begin)}
    assert len(shared) == 4
    first, *others = shared
    cached = {}
    for cache in ("radix", "naive"):
        with LLM("demo", attn=attn, cache_type=cache, page_size=16, **SIZES) as llm:
            assert not wrong(llm, {first: shared[first]})
            outputs = llm.generate(others, GREEDY)
            texts = [output.outputs[0].text for output in outputs]
            assert all(
                text.startswith(shared[prompt]) for text, prompt in zip(texts, others, strict=True)
            ), texts
            cached[cache] = [output.metrics.cached_tokens for output in outputs]
    told = len(first) // 4  # the facts and the sums, most of every prompt
    assert min(cached["radix"]) > told and set(cached["naive"]) == {0}, cached


@pytest.mark.feature("P7")
@pytest.mark.parametrize("runner", ["cudagraph", "eager"])
@pytest.mark.parametrize("attn", EIGHT_BITS)
def test_fp8_holds_twice_the_tokens_and_answers_right(attn: str, runner: str) -> None:
    sizes = {name: size for name, size in SIZES.items() if name != "num_pages"} | {
        "kv_memory_mb": 256
    }
    options = {
        "attn": attn,
        "runner": runner,
        "page_size": 16,
        "opt": ("fi.prefill=fa2",) * ("fi" in attn),
    }
    tokens = {}
    for kv_dtype in ("bfloat16", "fp8_e4m3"):
        with LLM("demo", kv_dtype=kv_dtype, **sizes, **options) as llm:
            tokens[kv_dtype] = llm._session.engine.summary.kv_tokens
            assert not wrong(llm, questions())
    assert abs(tokens["fp8_e4m3"] - 2 * tokens["bfloat16"]) <= 2 * 16, tokens


@pytest.mark.feature("P7")
def test_a_pair_without_fp8_says_why() -> None:
    with pytest.raises(CannotRun, match=r"fp8|float8"):
        LLM("demo", attn="trtllm", kv_dtype="fp8_e4m3", **SIZES)


@pytest.mark.feature("S7")
def test_a_limit_of_one_captures_one_row_alone() -> None:
    with LLM("demo", attn="fa,fi", runner="cudagraph", cuda_graph_max_bs=1, **SIZES) as llm:
        assert list(llm._session.engine.executor.runner.buckets.of_kind("rows")) == [1]
        assert not wrong(llm, questions())
        assert list(llm._session.engine.executor.runner.buckets.of_kind("rows")) == [1]


@pytest.mark.feature("S10")
def test_a_chat_on_a_terminal_has_graphs_of_one_row() -> None:
    ours, theirs = os.openpty()
    start = "import sys; from headstock.cli.main import main; sys.exit(main(sys.argv[1:]))"
    words = [
        sys.executable,
        "-c",
        start,
        "run",
        "--attn",
        "fa,fi",
        "--temperature",
        "0",
        "--max-tokens",
        "16",
    ]
    pipes = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "start_new_session": True,
    }
    chat = subprocess.Popen(words, stdin=theirs, **pipes)
    os.close(theirs)
    os.write(ours, b"What is 47 + 38?\n/exit\n")
    try:
        told, said = chat.communicate(timeout=60)
    finally:  # a chat that is left running keeps the device's memory from every later test
        chat.kill()
        os.close(ours)
    assert chat.returncode == 0, said
    assert "graphs for 1 batch size up to 1 and" in said and "85" in told, (said, told)


@pytest.mark.feature("P12")
def test_contiguous_mode_runs_eagerly_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sizes = {"device": "cuda", "max_seq_len": 2048, "max_running_requests": 8}
    with (
        caplog.at_level(logging.WARNING),
        LLM("demo", paged_attn="off", cuda_graph_max_bs=8, **sizes) as llm,
    ):
        assert llm._session.engine.summary.runner == "eager"
        assert not wrong(llm, questions())
    assert [record.message for record in caplog.records if "graph" in record.message] == [
        r'event="no graphs in contiguous mode" because="paged_attn=\"off\"" '
        'ignored="cuda_graph_max_bs (--cuda-graph-max-bs) 8"'
    ]


@pytest.mark.feature("P13", "G12")
@pytest.mark.parametrize("prefill", ["sdpa", "fa", "trtllm"])
def test_one_backend_for_prompts_and_another_in_graphs_over_one_pool(prefill: str) -> None:
    with LLM("demo", attn=f"{prefill},fi", runner="cudagraph", page_size=16, **SIZES) as llm:
        compared = graphs.Compared(llm._session.engine.executor.runner)
        assert not wrong(llm, questions())
    assert compared.steps["steps"] >= 8 and not compared.steps["logits differ"]


@pytest.mark.feature("G2")
@pytest.mark.parametrize("batch", graphs.BATCHES)
@pytest.mark.parametrize("attn", graphs.BACKENDS)
def test_replays_equal_the_same_steps_bit_for_bit(attn: str, batch: int) -> None:
    found = graphs.bits(attn, batch)
    assert found["ok"], found


@pytest.mark.feature("G9")
@pytest.mark.parametrize("attn", graphs.BACKENDS)
def test_lengths_of_512_1024_and_2048_record_nothing_anew_and_move_nothing(attn: str) -> None:
    found = graphs.lengths(attn)
    assert found["ok"], found


@pytest.mark.feature("G10")
@pytest.mark.parametrize("attn", ["fa,fi", "fi", "fa", "trtllm"])
def test_graphs_take_no_more_than_the_plan_counts(attn: str) -> None:
    deferred = ("--defer-graphs", "off")
    found = command("run", "--attn", attn, "--prompt", "12 + 30 =", "--temperature", "0", *deferred)
    assert found["code"] == 0 and found["out"].startswith(" 42."), found
    assert (
        "graphs for 23 batch sizes" in found["error"] and "more than planned" not in found["error"]
    ), found


@pytest.mark.feature("G11")
@pytest.mark.parametrize("spoilt", ["raises", "reads the device"])
def test_a_capture_that_is_spoilt_while_it_is_open_leaves_every_step_to_run_without_graphs(
    spoilt: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward = FlashAttentionBackend.forward

    def spoiling(
        self: FlashAttentionBackend, q: torch.Tensor, *arguments: Any, **more: Any
    ) -> None:
        if torch.cuda.is_current_stream_capturing():
            if spoilt == "raises":
                raise RuntimeError("not in a capture")
            q.sum().item()
        forward(self, q, *arguments, **more)

    monkeypatch.setattr(FlashAttentionBackend, "forward", spoiling)
    with (
        caplog.at_level(logging.DEBUG, "headstock"),
        LLM("demo", attn="fa", runner="cudagraph", **SIZES) as llm,
    ):
        assert not llm._session.engine.executor.runner.buckets.of_kind("rows")
        assert not wrong(llm, questions())
    said = [record.message for record in caplog.records]
    assert len([line for line in said if "graphs are off" in line]) == 1
    assert spoilt == "raises" or any("could not be ended" in line for line in said), (
        "this spoils no capture"
    )
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before, (
        "torch's allocator takes the capture to be open still"
    )
    torch.rand(1, device="cuda")  # raises where torch's generator does
    monkeypatch.undo()
    with LLM("demo", attn="fa", runner="cudagraph", **SIZES) as llm:
        assert llm._session.engine.executor.runner.buckets.of_kind("rows") and not wrong(
            llm, questions()
        )


@pytest.mark.feature("G11")
@pytest.mark.parametrize("fault", graphs.FAULTS)
def test_a_fault_hurts_whom_it_hits(fault: str) -> None:
    found = graphs.failure(fault)
    assert found["ok"], found


@pytest.mark.parametrize("runner", ["cudagraph", "eager"])
def test_a_row_of_nan_that_is_aborted_while_its_step_runs_leaves_no_nan_behind(
    runner: str,
) -> None:
    sizes = {
        "num_pages": 12,
        "page_size": 64,
        "max_seq_len": 512,
        "max_running_requests": 2,
        "max_batch_tokens": 512,
    }
    config = EngineConfig(device="cuda", attn="fa", runner=runner, cache_type="naive", **sizes)
    engine = Engine(config, hooks=FaultInjector.parse(("nan@3:1",)))
    rng = np.random.default_rng(0)
    lengths = {"first": 20, "sick": 300, "next": 3, "last": 10}
    for name, length in lengths.items():
        prompt = rng.integers(5, 500, length).astype(np.int32)
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        engine.submit(Request(id=name, prompt=prompt, max_tokens=20, params=params))
    while engine.plan is None or engine.plan.number < 3:
        engine.step()
    engine.abort("first")
    # before the result of step 3 is known; the seats go to the others in step 4
    engine.abort("sick")
    ends = {}
    while engine.has_work:
        ends |= {each.id: each.finish_reason for each in engine.step() if each.finish_reason}
    pools = engine.executor.inner.steps.buffers.pools
    assert all(bool(pool.isfinite().all()) for pool in pools)
    assert ends == {"first": "abort", "sick": "abort", "next": "length", "last": "length"}
    engine.close()


def test_an_engine_after_another_has_as_many_pages(tmp_path: Path) -> None:
    write_model_directory(MODEL_SHAPES["qwen3-0.6b"], tmp_path)
    counts = []
    for _ in range(2):
        with LLM(str(tmp_path), load_format="dummy", attn="fa", max_seq_len=2048) as llm:
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
            counts.append(llm._session.engine.stats().total_pages)
    assert counts[1] > 0.98 * counts[0], counts


def test_an_engine_starts_while_another_one_captures() -> None:
    settings = SIZES | {"num_pages": 256, "defer_graphs": True, "runner": "cudagraph"}

    def answer(llm: LLM) -> list[int]:
        return list(llm.generate("Once upon a time", GREEDY)[0].outputs[0].token_ids)

    with LLM("demo", **settings) as first:
        wanted = answer(first)
        deadline = time.monotonic() + 60
        captures = first._session.engine.late_captures
        num_started = 0
        # Each start takes a second or so, and the captures of the first engine go on meanwhile.
        while not captures.is_done and time.monotonic() < deadline:
            with LLM("demo", **settings) as second:
                num_started += 1
                assert answer(second) == wanted
        assert num_started
        assert answer(first) == wanted


@pytest.mark.feature("G13")
def test_one_stream_is_faster_with_graphs() -> None:
    seconds: dict[str, list[float]] = {}
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    for runner in ("cudagraph", "eager", "cudagraph", "eager"):
        with LLM("demo", attn="fa,fi", runner=runner, **SIZES) as llm:
            llm.generate(["Once"], params)
            began = time.perf_counter()
            llm.generate(["Once upon a time"], params)
            seconds.setdefault(runner, []).append(time.perf_counter() - began)
    assert max(seconds["cudagraph"]) < min(seconds["eager"]), seconds


@pytest.mark.feature("S18")
def test_one_stream_is_faster_with_overlap_where_steps_are_planned(tmp_path: Path) -> None:
    # steps of the demo model are too short to hide anything behind them
    write_model_directory(MODEL_SHAPES["qwen3-0.6b"], tmp_path)
    seconds: dict[bool, list[float]] = {}
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    for overlap in (True, False, True, False):
        with LLM(str(tmp_path), load_format="dummy", attn="fi", overlap=overlap, **SIZES) as llm:
            llm.generate(["Once"], params)
            began = time.perf_counter()
            llm.generate(["Once upon a time"], params)
            seconds.setdefault(overlap, []).append(time.perf_counter() - began)
    assert max(seconds[True]) < min(seconds[False]), seconds


@pytest.mark.feature("T18")
def test_an_engine_stays_within_its_budget_and_larger_steps_plan_for_more() -> None:
    planned = {}
    for tokens, rows in ((1024, 16), (8192, 16), (1024, 256)):
        words = [sys.executable, str(Path(__file__).with_name("budget.py")), str(tokens), str(rows)]
        done = subprocess.run(
            words, env=os.environ | EXPANDABLE, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert (0.45 if rows == 256 else 0) < found["taken"] <= 0.5, found
        planned[tokens, rows] = found["activations"]
    assert min(planned[8192, 16], planned[1024, 256]) > planned[1024, 16] > 0, planned


def test_the_doctor_finds_the_pair_fit() -> None:
    found = command("doctor", "--attn", "fa,fi")
    assert found["code"] == 0, found
    line = next(line for line in found["out"].splitlines() if "choice" in line)
    assert "PASS" in line, found["out"]
