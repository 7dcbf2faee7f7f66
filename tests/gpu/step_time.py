"""Where a decode step's time goes: kernels by class, and what is left between them."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections import defaultdict
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

CLASSES = {
    "attention": (
        "flash",
        "attention",
        "batchdecode",
        "batchprefill",
        "xqa",
        "fmha",
        "mha",
        "kernel_mha",
        "combine",
    ),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "splitk", "gemv", "linear"),
    "sampling": ("sample", "gumbel", "argmax", "softmax", "sort", "pick", "draw", "winner"),
    "norm, rope, activation": ("norm", "rope", "turn", "silu", "act_and_mul", "embed"),
    "copies and indexes": (
        "copy",
        "memcpy",
        "memset",
        "index",
        "gather",
        "scatter",
        "elementwise",
        "arange",
        "fill",
    ),
}
STEPS = 30


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
    """Microseconds a step by class of kernel, of so many rows at about this context."""
    rng = np.random.default_rng(0)
    for number in range(rows):
        prompt = rng.integers(0, 10_000, context).astype(np.int32)
        params = SamplingParams(temperature=0.6, seed=number, max_tokens=400, ignore_eos=True)
        engine.submit(Request(id=str(number), prompt=prompt, max_tokens=400, params=params))
    while engine.state.num_running < rows or (
        engine.plan is not None and engine.plan.num_decode < rows
    ):
        engine.step()
    walls, hosts = [], []
    for _ in range(60):
        began = time.perf_counter()
        engine.step()
        walls.append(time.perf_counter() - began)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(STEPS):
            began = time.process_time()
            engine.step()
            hosts.append(time.process_time() - began)
        torch.cuda.synchronize()
    totals: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            totals[event.name] += event.device_time
            counts[event.name] += 1
    classes: dict[str, float] = defaultdict(float)
    for name, total in totals.items():
        classes[class_of(name)] += total / STEPS
    top = sorted(totals, key=lambda name: -totals[name])[:25]
    return {
        "step_us": round(sorted(walls)[len(walls) // 2] * 1e6),
        "device_us": round(sum(totals.values()) / STEPS),
        "host_cpu_us": round(sorted(hosts)[len(hosts) // 2] * 1e6),
        "classes_us": {
            name: round(total) for name, total in sorted(classes.items(), key=lambda each: -each[1])
        },
        "top": {
            name[:110]: [round(totals[name] / STEPS, 1), round(counts[name] / STEPS, 1)]
            for name in top
        },
        "kernels_a_step": round(sum(counts.values()) / STEPS, 1),
    }


def class_of(name: str) -> str:
    """The class of a kernel, by its name."""
    lower = name.lower()
    return next(
        (label for label, parts in CLASSES.items() if any(part in lower for part in parts)), "other"
    )
