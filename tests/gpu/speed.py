"""How fast attention is by itself."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu.kernels import LAYER, Contestant

from headstock.spi import Phase
from headstock_conformance import attention as cases

SHAPE = {"page_size": 64, "heads": 16, "kv_heads": 8, "dtype": torch.bfloat16, "device": "cuda"}
DECODERS = (
    *(Contestant("fa", (f"fa.num_splits={number}",)) for number in (0, 1, 2, 4, 8, 16, 32)),
    Contestant("fi", ("fi.prefill=fa2", "fi.tensor_cores=on")),
    Contestant("fi", ("fi.prefill=fa2", "fi.tensor_cores=off")),
    Contestant("trtllm"),
)
RUNS = (("fa", 0.0), ("fa,fi", 0.0), ("fi", 0.0), ("trtllm", 0.0), ("fa", 0.6))
"""Backends and temperature of the runs of the whole engine."""


def main(builds: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """Microseconds of attention, host microseconds of planning."""
    lens = [300 + (row * 131) % 1100 for row in range(256)]
    found: dict[str, Any] = {"ok": True, "decode_us": {}, "prefill_us": {}, "plan_host_us": {}}
    contexts = {f"{rows} rows": lens[:rows] for rows in (1, 8, 64, 256)} | {
        "1 long row": [16_000],
        "8 long rows": [4_000] * 8,
    }
    for what, lengths in contexts.items():
        case = cases.make(Phase.DECODE, [(1, length) for length in lengths], **SHAPE)
        for who in DECODERS:
            found["decode_us"][f"{who}, {what}"] = attend(who, case, found["plan_host_us"])
    prompts = {
        Phase.PREFILL: [(1024, 1024)] * 16,
        Phase.EXTEND: [(1 + 19 * i, 300 + 100 * i) for i in range(16)],
    }
    for phase, rows in prompts.items():
        case = cases.make(phase, rows, **SHAPE)
        for who in (
            Contestant("fa"),
            Contestant("fi"),
            Contestant("fi", ("fi.prefill=fa2",)),
            Contestant("trtllm"),
        ):
            found["prefill_us"][f"{who}, {phase.value}"] = attend(who, case, found["plan_host_us"])
    return found


def attend(who: Contestant, case: cases.Case, plans: dict[str, float]) -> float | str:
    """Microseconds of one layer's attention on the device."""
    try:
        backend, step, rows = who.make(case), case.step, case.step.num_rows
        plan = backend.plan(step)
        out = torch.empty_like(case.q)
        plans[f"{who}, {rows} rows, {step.phase.value}"] = host_us(lambda: backend.plan(step))
        if step.phase is Phase.DECODE:
            backend.graph_init([rows], 16_384)
            static = backend.graph_plan(rows, step)
            plans[f"{who}, {rows} rows, replayed"] = host_us(
                lambda: backend.graph_update(static, step)
            )
        plan = backend.plan(step)
        return device_us(lambda: backend.forward(case.q, LAYER, plan, out))
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


def device_us(work: Callable[[], object], launches: int = 20, times: int = 7) -> float:
    """The median over some times of what one launch takes on the device, queued behind a sleep."""
    work()
    found = []
    for _ in range(times):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(10_000_000)
        start.record()
        for _ in range(launches):
            work()
        stop.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(stop) * 1000 / launches)
    return round(statistics.median(found), 1)


def host_us(work: Callable[[], object], times: int = 15) -> float:
    """The median of what the host spends."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        found.append((time.perf_counter() - began) * 1e6)
        torch.cuda.synchronize()
    return round(statistics.median(found), 1)
