"""Long prompts beside streams, under several bounds on the time between tokens.

    PYTHONPATH=tests:tests/support GPU_OUT=OUT python -m gpu.bounds

Streams decode; long prompts arrive among them one by one. A finding has the time between tokens of
the streams while long prompts arrive or are computed, and the time to first token of these.
Percentiles are over all runs. Each finding is a line of OUT/bounds.jsonl and of standard error as
soon as it is made.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from attrs import asdict, frozen

from headstock import LLM, SamplingParams, __version__
from headstock.llm import get_session
from headstock_bench.conditions import read_conditions
from headstock_bench.latency import StreamTimes
from headstock_bench.latency_workloads import LatencyWorkload
from headstock_bench.model_shapes import MODEL_SHAPES, write_model_directory
from headstock_bench.streams import stream_requests
from headstock_bench.workloads import draw_tokens

BOUNDS = (None, 32.0, 16.0, 8.0, 4.0)
"""Milliseconds; None: no bound."""
RUNS = 3


@frozen(kw_only=True)
class Load:
    """What runs: so many streams, and prompts that arrive every `interval` seconds from `first` on.

    `prompt` and `answer` are tokens of a stream, `long` of a prompt beside it.
    """

    long: int
    interval: float
    streams: int = 16
    prompt: int = 512
    answer: int = 1200
    count: int = 6
    first: float = 0.4


LOADS = (Load(long=8_000, interval=0.3), Load(long=30_000, interval=0.5))


def main(builds: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """Findings for each `SHAPE:ATTN` of `GPU_BOUNDS`, parted by semicolons."""
    found: dict[str, Any] = {"ok": True}
    for text in os.environ.get("GPU_BOUNDS", "qwen3-0.6b:fa").split(";"):
        shape, attn = text.split(":")
        settings = {"device": "cuda", "attn": attn, "max_seq_len": 32_768}
        found[text] = [
            finding for bound in BOUNDS for finding in measure(shape, bound, LOADS, settings)
        ]
    return found


def measure(
    shape: str, bound: float | None, loads: Sequence[Load], settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """The findings of all loads under one bound, of a shape with random weights."""
    findings = []
    with tempfile.TemporaryDirectory() as folder:
        write_model_directory(MODEL_SHAPES[shape], Path(folder))
        with LLM(
            folder, load_format="dummy", max_itl_ms=bound, defer_graphs=False, **settings
        ) as llm:
            conditions = asdict(
                read_conditions(llm, version=__version__, shape=shape, weights="dummy")
            )
            for load in loads:
                run(llm, load, 0)  # kernels are compiled, and the engine times its steps
                # As a server does: a collection of all that imports made takes 150 ms.
                gc.collect()
                gc.freeze()
                runs = [run(llm, load, number) for number in range(1, RUNS + 1)]
                findings.append(
                    conditions | {"bound_ms": bound, "load": asdict(load)} | summarize(runs, load)
                )
                note(findings[-1])
    return findings


def note(finding: dict[str, Any]) -> None:
    """Append a finding to bounds.jsonl in `GPU_OUT`, where that is given, and to standard error."""
    line = json.dumps(finding) + "\n"
    sys.stderr.write(line)
    sys.stderr.flush()
    if "GPU_OUT" in os.environ:
        with (Path(os.environ["GPU_OUT"]) / "bounds.jsonl").open("a", encoding="utf-8") as file:
            file.write(line)


def run(llm: LLM, load: Load, seed: int) -> list[StreamTimes]:
    """What the callers saw: of the streams, then of the long prompts."""
    rng = Random(seed)
    prompts = [draw_tokens(rng, load.prompt) for _ in range(load.streams)]
    prompts += [draw_tokens(rng, load.long) for _ in range(load.count)]
    arrivals = [0.0] * load.streams
    arrivals += [load.first + number * load.interval for number in range(load.count)]
    outputs = (load.answer,) * load.streams + (1,) * load.count
    workload = LatencyWorkload(
        name="long prompts beside streams",
        prompts=tuple(prompts),
        outputs=outputs,
        temperature=0.6,
        arrivals=tuple(arrivals),
    ).fit_vocab(get_session(llm).engine.model.vocab)
    params = [
        SamplingParams(temperature=0.6, seed=number, max_tokens=count, ignore_eos=True)
        for number, count in enumerate(outputs)
    ]
    llm.reset_prefix_cache()
    streams, _ = stream_requests(llm, workload, params)
    return streams


def summarize(runs: Sequence[Sequence[StreamTimes]], load: Load) -> dict[str, Any]:
    """Percentiles in ms over all runs: of gaps that end while long prompts arrive or are computed,
    and of the long prompts' first tokens.

    raises: ValueError where the streams end before the last long prompt has its token
    """
    gaps, firsts = [], []
    for times in runs:
        streams, longs = times[: load.streams], times[load.streams :]
        begin, end = longs[0].arrival, longs[-1].times[0]
        if any(stream.times[-1] < end for stream in streams):
            raise ValueError("a stream ended before the last long prompt: give it more tokens")
        for stream in streams:
            moments = np.array(stream.times)
            inside = (moments[1:] >= begin) & (moments[1:] <= end)
            gaps.extend((1e3 * np.diff(moments)[inside]).tolist())
        firsts.extend(1e3 * (long.times[0] - long.arrival) for long in longs)
    return {
        "gaps": len(gaps),
        **{f"itl_p{at}_ms": round(float(np.percentile(gaps, at)), 2) for at in (50, 99, 100)},
        **{f"ttft_p{at}_ms": round(float(np.percentile(firsts, at)), 1) for at in (50, 100)},
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main([]), indent=1))
