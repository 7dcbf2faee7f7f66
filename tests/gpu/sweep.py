"""Throughput by the number of streams, a decode step by context and by class of kernel, and
workloads that nothing was tuned for.

    PYTHONPATH=tests:tests/support GPU_OUT=OUT python -m gpu.sweep

Each finding is a line of OUT/sweep.jsonl and of standard error as soon as it is made. On an H200
the 0.6B shape takes about 75 s, and 40 s more where Triton has kept no kernels.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from attrs import asdict
from gpu.step_time import draw_prompt, end_requests, split, start_decoding

from headstock import LLM, SamplingParams, __version__
from headstock.config import EngineConfig
from headstock.engine.engine import Engine
from headstock_bench.conditions import read_conditions
from headstock_bench.latency import StreamTimes
from headstock_bench.latency_workloads import LatencyWorkload
from headstock_bench.limits import measure_rates
from headstock_bench.model_shapes import MODEL_SHAPES, ModelShape, write_model_directory
from headstock_bench.streams import stream_requests
from headstock_bench.workloads import Workload, draw_tokens

STREAMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPT, ANSWER = 512, 128
RUNS = 3
LEAST_RATIO = 0.95
"""Of the throughput of more streams and the best of fewer; less is a fall."""
ROWS = (1, 32)
CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32000)
MAX_SEQ_LEN = 32768
TIMED_STEPS = 20
STEPS = ((1, 460), (8, 640), (32, 640), (256, 840))
"""Rows and contexts whose steps are divided by class of kernel."""
HEAD_DIM = 128

Note = Callable[[dict[str, Any]], None]
"""Writes a finding down."""


def main(builds: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """Findings for each `SHAPE:ATTN` of `GPU_SWEEP`, parted by semicolons."""
    found: dict[str, Any] = {"ok": True}
    for text in os.environ.get("GPU_SWEEP", "qwen3-0.6b:fa").split(";"):
        shape, attn = text.split(":")
        settings = {"device": "cuda", "attn": attn}
        findings = measure(shape, MODEL_SHAPES[shape], settings, partial(note, text, time.time()))
        found[text] = findings
        found["ok"] = found["ok"] and findings["falls"] == []
    return found


def note(text: str, began: float, finding: dict[str, Any]) -> None:
    """Append a finding to sweep.jsonl in `GPU_OUT`, where that is given, and to standard error."""
    line = json.dumps({"sweep": text, "after_s": round(time.time() - began, 1)} | finding) + "\n"
    sys.stderr.write(line)
    sys.stderr.flush()
    if "GPU_OUT" in os.environ:
        with (Path(os.environ["GPU_OUT"]) / "sweep.jsonl").open("a", encoding="utf-8") as file:
            file.write(line)


def measure(name: str, shape: ModelShape, settings: dict[str, Any], note: Note) -> dict[str, Any]:
    """All findings of one shape with random weights."""
    settings = {"load_format": "dummy", "max_seq_len": MAX_SEQ_LEN} | settings
    rate = measure_rates("cuda", torch.bfloat16).bytes_s  # before an engine takes the memory
    note({"copy_bytes_s": rate})
    with tempfile.TemporaryDirectory() as folder:
        write_model_directory(shape, Path(folder))
        with LLM(folder, **settings) as llm:
            found = measure_workloads(llm, name, note)
        engine = Engine(EngineConfig(model=folder, **settings))
        try:
            return found | {"copy_bytes_s": rate} | measure_steps(engine, shape, rate, note)
        finally:
            engine.close()


def measure_workloads(llm: LLM, name: str, note: Note) -> dict[str, Any]:
    """Throughput by streams, where it falls, and the other workloads."""
    conditions = asdict(read_conditions(llm, version=__version__, shape=name, weights="dummy"))
    note({"conditions": conditions})
    streams = []
    for count in STREAMS:
        streams.append(measure_streams(llm, count))
        note({"streams": streams[-1]})
    falls = find_falls(streams)
    note({"falls": falls})
    others = []
    for workload in draw_others():
        seconds, itl_ms = time_workload(llm, workload, runs=2)
        others.append(
            {
                "work": workload.name,
                "seconds": seconds,
                "in_tok_s": round(workload.tokens_in / seconds),
                "out_tok_s": round(sum(workload.outputs) / seconds),
                "itl_ms": itl_ms,
            }
        )
        note({"others": others[-1]})
    return {"conditions": conditions, "streams": streams, "falls": falls, "others": others}


def find_falls(streams: Sequence[dict[str, Any]]) -> list[tuple[int, str]]:
    """Numbers of streams at which so many have less throughput than any fewer, and the field."""
    falls = []
    for field in ("out_tok_s", "streamed_out_tok_s"):
        best = 0.0
        for each in streams:
            if each[field] < LEAST_RATIO * best:
                falls.append((each["streams"], field))
            best = max(best, each[field])
    return falls


def measure_streams(llm: LLM, count: int) -> dict[str, Any]:
    """So many requests that begin at once: tokens a second of all and time between tokens.

    out_tok_s, itl_ms: of one call of `generate`, the median request's time a token after its first
    streamed_*: where each token is handed at once to a caller in the same process
    """
    rng = Random(count)
    prompts = tuple(draw_tokens(rng, PROMPT) for _ in range(count))
    work = {"name": f"{count} streams", "prompts": prompts, "outputs": (ANSWER,) * count}
    seconds, itl_ms = time_workload(llm, Workload(**work, temperature=0.6), runs=RUNS)
    workload = LatencyWorkload(**work, temperature=0.6, arrivals=(0.0,) * count)
    timed = []
    for _ in range(RUNS):
        llm.reset_prefix_cache()
        timed.append(stream_requests(llm, workload, make_params(workload)))
    streams, streamed = min(timed, key=lambda each: each[1])
    return {
        "streams": count,
        "prompt": PROMPT,
        "answer": ANSWER,
        "seconds": seconds,
        "out_tok_s": round(count * ANSWER / seconds, 1),
        "itl_ms": itl_ms,
        "streamed_runs_s": [round(each[1], 4) for each in timed],
        "streamed_out_tok_s": round(count * ANSWER / streamed, 1),
        "streamed_itl_ms": round(1e3 * statistics.median(map(time_token, streams)), 3),
        "streamed_ttft_ms": round(
            1e3 * statistics.median(each.times[0] - each.arrival for each in streams), 1
        ),
    }


def time_token(stream: StreamTimes) -> float:
    """Seconds a token after the first.   raises: ValueError for a stream that is cut short"""
    if len(stream.token_ids) != ANSWER:
        raise ValueError(f"{len(stream.token_ids)} tokens of {ANSWER} came: {stream.error}")
    return (stream.times[-1] - stream.times[0]) / (len(stream.token_ids) - 1)


def draw_others() -> list[Workload]:
    """Workloads like the measured ones, but other ones."""
    rng = Random(1)
    prefixes = [draw_tokens(rng, 1024) for _ in range(8)]
    small = [draw_tokens(rng, 64) for _ in range(1024)]
    large = [draw_tokens(rng, 30_000) for _ in range(4)]
    shared = [prefixes[number % 8] + draw_tokens(rng, 128) for number in range(256)]
    mixed = [draw_tokens(rng, rng.randint(16, 2048)) for _ in range(384)]
    outputs = [rng.randint(16, 256) for _ in mixed]
    return [
        Workload(name=name, prompts=tuple(prompts), outputs=tuple(outputs), temperature=0.6)
        for name, prompts, outputs in (
            ("1,024 requests of 64 in, 64 out", small, [64] * 1024),
            ("4 requests of 30,000 in, 16 out", large, [16] * 4),
            ("256 requests, 8 prefixes of 1,024, 128 own, 64 out", shared, [64] * 256),
            ("384 requests of 16-2,048 in, 16-256 out", mixed, outputs),
        )
    ]


def time_workload(llm: LLM, workload: Workload, *, runs: int) -> tuple[float, float]:
    """Seconds of the fastest run from an empty prefix cache, and its milliseconds between tokens.

    raises: RuntimeError when a request fails
    """
    params, timed = make_params(workload), []
    for _ in range(runs):
        llm.reset_prefix_cache()
        began = time.perf_counter()
        outputs = llm.generate([list(prompt) for prompt in workload.prompts], params)
        timed.append((time.perf_counter() - began, outputs))
    seconds, outputs = min(timed, key=lambda each: each[0])
    gaps = []
    for output, count in zip(outputs, workload.outputs, strict=True):
        metrics, answer = output.metrics, output.outputs[0]
        if len(answer.token_ids) != count or metrics.first_token is None or metrics.end is None:
            raise RuntimeError(f"{workload.name}: {len(answer.token_ids)} of {count} tokens came")
        gaps.append((metrics.end - metrics.first_token) / (count - 1))
    return round(seconds, 4), round(1e3 * statistics.median(gaps), 3)


def make_params(workload: Workload) -> list[SamplingParams]:
    """How the requests of a workload sample, in order."""
    return [
        SamplingParams(
            temperature=workload.temperature, seed=number, max_tokens=count, ignore_eos=True
        )
        for number, count in enumerate(workload.outputs)
    ]


def measure_steps(
    engine: Engine, shape: ModelShape, copy_rate: float, note: Note
) -> dict[str, Any]:
    """A decode step by context, and by class of kernel.

    copy_rate: bytes a second, read and written
    """
    contexts, classes = [], []
    for rows in ROWS:
        # A context's prompts begin with those of the context before: the prefix index has these.
        rng = np.random.default_rng(rows)
        prompts = [draw_prompt(rng, engine, max(CONTEXTS)) for _ in range(rows)]
        for context in CONTEXTS:
            contexts.append(time_step(engine, [prompt[:context] for prompt in prompts]))
            note({"contexts": contexts[-1]})
    for rows, context in STEPS:
        found = split(engine, rows, context)
        limit = limit_step(shape, rows, found["context"], copy_rate)
        classes.append({"rows": rows, "limit_us": limit, **found})
        note({"classes": classes[-1]})
    return {"contexts": contexts, "classes": classes}


def time_step(engine: Engine, prompts: Sequence[np.ndarray]) -> dict[str, Any]:
    """Microseconds of a decode step after these prompts, the median; None where no room is."""
    found = {"rows": len(prompts), "context": len(prompts[0]), "step_us": None}
    # A row has grown by as many tokens as the prompts took steps, or somewhat more.
    pages = len(prompts) * engine.limits.pages_for(len(prompts[0]) + 512)
    if pages > min(engine.limits.num_pages):
        return found
    ids = start_decoding(engine, prompts, TIMED_STEPS + 10)
    times = []
    for _ in range(TIMED_STEPS):
        began = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - began)
    end_requests(engine, ids)
    return found | {"step_us": round(1e6 * statistics.median(times), 1)}


def limit_step(shape: ModelShape, rows: int, context: int, copy_rate: float) -> float | None:
    """Microseconds in which a copy reads the weights, and the keys and values, in 16 bits.

    copy_rate: bytes a second, read and written
    returns: None for experts: how many of them a step reads depends on its tokens.
    """
    if shape.experts is not None:
        return None
    heads = shape.heads + 2 * shape.kv_heads
    attention = shape.hidden * HEAD_DIM * (heads + shape.heads)
    layer = attention + 3 * shape.hidden * shape.intermediate
    weights = shape.layers * layer + shape.vocab * shape.hidden
    kv = rows * context * shape.layers * 2 * shape.kv_heads * HEAD_DIM
    return round(1e6 * 2 * (weights + kv) / copy_rate, 1)


if __name__ == "__main__":
    findings = main([])
    if "GPU_OUT" in os.environ:
        (Path(os.environ["GPU_OUT"]) / "sweep.json").write_text(json.dumps(findings, indent=1))
    sys.exit(0 if findings["ok"] else 1)
