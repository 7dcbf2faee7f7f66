"""Where a decode step's time goes: kernels by class, and what is left between them.

    GPU_PROFILE="qwen3-0.6b:fa:256:840;qwen3-0.6b:fa,fi:1:400:torch" nox -s gpu -- --parts step_time

Each entry is `SHAPE:ATTN:ROWS:CONTEXT`, `:OPS` may follow. The first run also compiles what the
backends lack, so believe the second.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from headstock import SamplingParams
from headstock.config import EngineConfig
from headstock.engine.engine import Engine
from headstock.scheduler import Request
from headstock_bench.model_shapes import MODEL_SHAPES, write_model_directory
from headstock_bench.profile import classify_operation, divide_busy_time

TIMED_STEPS = 60
STEPS = 10


def main(builds: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """The split for each `SHAPE:ATTN:ROWS:CONTEXT` of `GPU_PROFILE`, parted by semicolons."""
    asked = os.environ.get("GPU_PROFILE", "qwen3-0.6b:fa:256:840;qwen3-0.6b:fa:1:400")
    return {"ok": True} | {text: attempt(*text.split(":")) for text in asked.split(";")}


def attempt(shape: str, attn: str, rows: str, context: str, ops: str = "auto") -> dict[str, Any]:
    """The split, or what it failed of."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_model_directory(MODEL_SHAPES[shape], Path(folder))
            config = EngineConfig(
                model=folder,
                device="cuda",
                load_format="dummy",
                attn=attn,
                ops=ops,
                max_seq_len=2200,
            )
            engine = Engine(config)
            try:
                return split(engine, int(rows), int(context))
            finally:
                engine.close()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"}


def split(engine: Engine, rows: int, context: int) -> dict[str, Any]:
    """Microseconds a step by class of kernel, of so many rows at about this context.

    The engine has no work before and none afterwards.   raises: as `start_decoding`
    """
    rng = np.random.default_rng(0)
    prompts = [draw_prompt(rng, engine, context) for _ in range(rows)]
    # The steps below, and some more that overlap may have launched or planned.
    ids = start_decoding(engine, prompts, TIMED_STEPS + STEPS + 10)
    walls, hosts, contexts, profiled = [], [], [], []
    for _ in range(TIMED_STEPS):
        began = time.perf_counter()
        engine.step()
        walls.append(time.perf_counter() - began)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(STEPS):
            began = time.process_time()
            wall_began = time.perf_counter()
            engine.step()
            profiled.append(time.perf_counter() - wall_began)
            hosts.append(time.process_time() - began)
            assert engine.plan is not None and engine.plan.num_decode == rows
            contexts.append(float(engine.plan.stops.mean()))
        torch.cuda.synchronize()
    end_requests(engine, ids)
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    kernels = divide_busy_time(spans)
    totals: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for name, microseconds in kernels:
        totals[name] += microseconds
        counts[name] += 1
    classes: dict[str, float] = defaultdict(float)
    for name, total in totals.items():
        classes[classify_operation(name)] += total / STEPS
    top = sorted(totals, key=lambda name: -totals[name])[:25]
    return {
        "context": round(statistics.mean(contexts)),
        "step_us": round(sorted(walls)[len(walls) // 2] * 1e6),
        "profiled_step_us": round(statistics.median(profiled) * 1e6),
        "device_us": round(sum(totals.values()) / STEPS),
        "host_cpu_us": round(sorted(hosts)[len(hosts) // 2] * 1e6),
        "head_us": round(sum_heads(kernels) / STEPS, 1),
        "classes_us": {
            name: round(total) for name, total in sorted(classes.items(), key=lambda each: -each[1])
        },
        "top": {
            name[:110]: [round(totals[name] / STEPS, 1), round(counts[name] / STEPS, 1)]
            for name in top
        },
        "kernels_a_step": round(sum(counts.values()) / STEPS, 1),
    }


def sum_heads(kernels: Sequence[tuple[str, float]]) -> float:
    """The time of each step's product with the vocabulary, which the class of products includes.

    That is the longest product between a step's last attention and its first kernel of sampling.

    kernels: name and time of each, in the order in which they began
    """
    total = longest = 0.0
    for name, microseconds in kernels:
        label = classify_operation(name)
        if label == "products":
            longest = max(longest, microseconds)
        elif label == "attention":
            longest = 0.0
        elif label == "sampling":
            total, longest = total + longest, 0.0
    return total


def draw_prompt(rng: np.random.Generator, engine: Engine, length: int) -> np.ndarray:
    """Random tokens that the engine's model knows. [length] int32"""
    return rng.integers(0, min(10_000, engine.model.vocab), length).astype(np.int32)


def start_decoding(engine: Engine, prompts: Sequence[np.ndarray], steps: int) -> list[str]:
    """Step until the next step decodes all prompts' requests, and has `steps` more after it.

    returns: the requests' ids
    raises: RuntimeError when that cannot come, since a request ended before
    """
    # Decode rows go on while prompts are computed, so the first request answers with a token for
    # each of these steps. Fewer would end it before the last request decodes.
    prompt_steps = -(-sum(map(len, prompts)) // (engine.limits.max_batch_tokens - len(prompts)))
    # Chunks may be cut, and a step or two come before the first.
    wait = 2 * prompt_steps + 10
    most = wait + steps
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.6, seed=number, max_tokens=most, ignore_eos=True)
        engine.submit(Request(id=str(number), prompt=prompt, max_tokens=most, params=params))
    for _ in range(wait):
        engine.step()
        if engine.plan is not None and engine.plan.num_decode == len(prompts):
            return [str(number) for number in range(len(prompts))]
    raise RuntimeError(
        f"{len(prompts)} rows of {max(map(len, prompts))} tokens do not decode together after "
        f"{wait} steps: {engine.state.num_running} run, {len(engine.state.waiting)} "
        f"wait, and there are {engine.limits.num_pages} pages of {engine.limits.page_size}"
    )


def end_requests(engine: Engine, ids: Sequence[str]) -> None:
    """Abort requests, and step until the engine has no work."""
    for id in ids:
        engine.abort(id)
    while engine.has_work:
        engine.step()
