"""Throughput by the number of streams, a decode step by context, and workloads that nothing was
tuned for.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from gpu.step_time import split

from headstock import LLM, SamplingParams
from headstock.config import EngineConfig
from headstock.engine.engine import Engine
from headstock.scheduler import Request
from headstock_bench.model_shapes import MODEL_SHAPES, write_model_directory
from headstock_bench.workloads import draw_tokens

STREAMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPT, ANSWER = 512, 128
CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32000)
STEPS = ((1, 460), (8, 640), (32, 640), (256, 840))
"""Rows and contexts whose steps are divided by class of kernel."""


def main(builds: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """Findings for each `SHAPE:ATTN` of `GPU_SWEEP`, parted by semicolons."""
    found: dict[str, Any] = {"ok": True}
    for text in os.environ.get("GPU_SWEEP", "qwen3-0.6b:fa").split(";"):
        shape, attn = text.split(":")
        with tempfile.TemporaryDirectory() as folder:
            write_model_directory(MODEL_SHAPES[shape], Path(folder))
            found[text] = measure(folder, attn)
        sys.stderr.write(f"{text}: {found[text]}\n")
        found["ok"] = found["ok"] and found[text]["falls"] == []
    return found


def measure(folder: str, attn: str) -> dict[str, Any]:
    """All findings of one model directory."""
    settings = {"load_format": "dummy", "device": "cuda", "attn": attn, "max_seq_len": 32768}
    with LLM(folder, **settings) as llm:
        streams = {count: throughput(llm, count) for count in STREAMS}
        others = {name: time_workload(llm, *work) for name, work in draw_others().items()}
    engine = Engine(EngineConfig(model=folder, **settings))
    try:
        contexts = {
            f"{rows} x {context}": decode_step(engine, rows, context)
            for rows, most in ((1, 32_000), (32, 16_384))
            for context in CONTEXTS
            if context <= most
        }
        classes = {}
        for rows, context in STEPS:
            classes[f"{rows} x {context}"] = split(engine, rows, context)
            finish(engine)
    finally:
        engine.close()
    speeds = [each["out_tok_s"] for each in streams.values()]
    falls = [
        count
        for count, before, speed in zip(STREAMS[1:], speeds, speeds[1:], strict=False)
        if speed < 0.95 * before
    ]
    return {
        "streams": streams,
        "falls": falls,
        "others": others,
        "contexts_us": contexts,
        "classes": classes,
    }


def throughput(llm: LLM, count: int) -> dict[str, float]:
    """Tokens a second of so many streams, all together and each; the best of two runs."""
    rng = Random(count)
    prompts = [draw_tokens(rng, PROMPT) for _ in range(count)]
    seconds = time_workload(llm, prompts, [ANSWER] * count)
    sys.stderr.write(f"{count} streams: {seconds} s\n")
    return {
        "seconds": seconds,
        "out_tok_s": round(count * ANSWER / seconds, 1),
        "tok_s_each": round(ANSWER / seconds, 2),
    }


def draw_others() -> dict[str, tuple[list[tuple[int, ...]], list[int]]]:
    """Prompts and answers' lengths of workloads like the measured ones, but other ones."""
    rng = Random(1)
    prefixes = [draw_tokens(rng, 1024) for _ in range(8)]
    return {
        "1,024 requests of 64 in, 64 out": (
            [draw_tokens(rng, 64) for _ in range(1024)],
            [64] * 1024,
        ),
        "4 requests of 30,000 in, 16 out": ([draw_tokens(rng, 30_000) for _ in range(4)], [16] * 4),
        "256 requests, 8 prefixes of 1,024, 128 own, 64 out": (
            [prefixes[number % 8] + draw_tokens(rng, 128) for number in range(256)],
            [64] * 256,
        ),
        "512 requests of 100-512 in, 100-512 out": (
            [draw_tokens(rng, rng.randint(100, 512)) for _ in range(512)],
            [rng.randint(100, 512) for _ in range(512)],
        ),
    }


def time_workload(llm: LLM, prompts: list[tuple[int, ...]], outputs: list[int]) -> float:
    """Seconds of the faster of two runs, each with an empty prefix cache."""
    params = [
        SamplingParams(temperature=0.6, seed=number, max_tokens=count, ignore_eos=True)
        for number, count in enumerate(outputs)
    ]
    runs = []
    for _ in range(2):
        llm.reset_prefix_cache()
        began = time.perf_counter()
        llm.generate([list(prompt) for prompt in prompts], params)
        runs.append(time.perf_counter() - began)
    return round(min(runs), 4)


def decode_step(engine: Engine, rows: int, context: int) -> float:
    """Microseconds of a decode step of so many rows at about this context, the median of 20."""
    rng = np.random.default_rng(context)
    # The first rows decode until the last prompts are computed.
    count = 60 + rows * context // engine.limits.max_batch_tokens * 2
    for number in range(rows):
        params = SamplingParams(temperature=0.6, seed=number, max_tokens=count, ignore_eos=True)
        prompt = rng.integers(0, min(10_000, engine.model.vocab), context).astype(np.int32)
        engine.submit(
            Request(id=f"{context} {number}", prompt=prompt, max_tokens=count, params=params)
        )
    steps = 0
    while engine.plan is None or engine.plan.num_decode < rows:
        engine.step()
        steps += 1
        if steps > 2 * count:
            raise RuntimeError(f"{rows} rows of {context} tokens never decode together")
    times = []
    for _ in range(20):
        began = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - began)
    finish(engine)
    median = round(1e6 * statistics.median(times), 1)
    sys.stderr.write(f"{rows} x {context}: {median} us\n")
    return median


def finish(engine: Engine) -> None:
    """Step until every request has ended."""
    while engine.has_work:
        engine.step()
