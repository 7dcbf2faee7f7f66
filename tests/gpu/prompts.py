"""Replayed steps with prompt tokens: bits against the same bucket computed at once, and the time to
a first token.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headstock import LLM, SamplingParams
from headstock.spi import AttendInto, Step
from headstock_bench.model_shapes import MODEL_SHAPES, write_model_directory
from headstock_cuda_graph.prompt_graphs import FEW_TOKENS, PromptBucket
from headstock_cuda_graph.runner import CudaGraphRunner

LENGTHS = (16, 128, 512, 2048)
SHORT = 128
"""Tokens of a row up to which a whole graph for short contexts serves."""
TURNS = 15


def main(builds: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """Findings for each `SHAPE:ATTN` of `GPU_PROMPTS`, parted by semicolons."""
    for build in builds:
        build.wait()
    asked = os.environ.get("GPU_PROMPTS", "qwen3-0.6b:fa;qwen3-0.6b:fa,fi")
    found: dict[str, Any] = {"ok": True}
    for text in asked.split(";"):
        found[text] = attempt(*text.split(":"))
        found["ok"] = found["ok"] and found[text]["ok"]
        sys.stderr.write(f"{text}: {found[text]}\n")
    return found


def attempt(shape: str, attn: str) -> dict[str, Any]:
    """Bits and times of a shape with random weights."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model_directory(MODEL_SHAPES[shape], Path(folder))
        settings = {"load_format": "dummy", "device": "cuda", "attn": attn, "max_seq_len": 5120}
        # Lower than by default, so that the requests of `bits` have longer contexts too.
        settings["opt"] = (f"cudagraph.short_context={SHORT}",)
        settings["defer_graphs"] = False
        for most in (None, 0):
            with LLM(folder, cuda_graph_max_tokens=most, **settings) as llm:
                name = "replayed" if most is None else "eager"
                found[name] = {"first_ms": {length: first_token(llm, length) for length in LENGTHS}}
                found[name]["notes"] = [
                    note for note in llm._session.engine.summary.notes if "graph" in note
                ]
                if most is None:
                    found["bits"] = bits(llm)
    seen = Counter(found["bits"])
    found["ok"] = (
        not seen["differ"] + seen["not finite"] + seen["whole unlike pieces"]
        and seen["whole"] > 10
        and seen["whole, long"] > 10
    )
    return found


def first_token(llm: LLM, length: int) -> dict[str, float]:
    """Milliseconds to the first of two tokens, and to the end of a request of one."""
    rng = np.random.default_rng(length)
    firsts, wholes = [], []
    for _ in range(TURNS):
        prompt = rng.integers(0, 10_000, length).tolist()
        began = time.perf_counter()
        for _ in llm.stream(
            prompt, SamplingParams(temperature=0.6, seed=1, max_tokens=2, ignore_eos=True)
        ):
            firsts.append(time.perf_counter() - began)
            began = float("-inf")
        prompt = rng.integers(0, 10_000, length).tolist()
        began = time.perf_counter()
        llm.generate(prompt, SamplingParams(temperature=0.6, seed=1, max_tokens=1, ignore_eos=True))
        wholes.append(time.perf_counter() - began)
    firsts = [each for each in firsts if each < 1e6]
    return {
        "first": round(1e3 * statistics.median(firsts), 2),
        "whole": round(1e3 * statistics.median(wholes), 2),
    }


def bits(llm: LLM) -> dict[str, int]:
    """How many replayed steps differ in any bit from the same bucket computed operation by
    operation.
    """
    runner = llm._session.engine.executor.runner
    with compared(runner) as counts:
        rng = np.random.default_rng(3)
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        for count in (1, 3, 8, 24):
            prompts = [
                rng.integers(0, 10_000, int(rng.integers(1, 1400 // count))).tolist()
                for _ in range(count)
            ]
            streams = [llm.stream(prompt, params) for prompt in prompts]
            for stream in streams:  # each joins while those before it decode
                next(stream)
            for stream in streams:
                list(stream)
            llm.generate(prompts[0] + prompts[0], params)
            llm.generate([[3, *prompt] for prompt in prompts], params)
        for number in range(12):
            llm.generate(rng.integers(0, 10_000, 40 * number + 1).tolist(), params)
    return dict(counts)


@contextmanager
def compared(runner: CudaGraphRunner) -> Iterator[Counter[str]]:
    """Counts replays by kind, and those that differ from the same computed at once, as long as the
    context lasts.
    """
    counts: Counter[str] = Counter()
    prompts = runner.prompts
    assert prompts is not None
    replay = prompts.replay

    @torch.inference_mode()
    def counted(
        bucket: PromptBucket, step: Step, last_tokens: torch.Tensor, out: torch.Tensor
    ) -> None:
        replay(bucket, step, last_tokens, out)
        tokens, rows = step.num_tokens, len(step.row_ids)
        attention: AttendInto = step.attention()

        def attend(q: torch.Tensor, index: int, out: torch.Tensor) -> None:
            attention(q[:tokens], index, out[:tokens])

        graph = prompts.whole_for(bucket, step)
        whole = graph is not None
        in_pieces = prompts.forward(bucket.inputs, attend)[last_tokens[:rows]]
        if graph is not None:
            inputs = bucket.inputs.first_rows(graph.rows)
            again = prompts.forward_whole(inputs, graph.longest, graph.prefixes)[:rows]
        else:
            again = in_pieces
        counts["whole" if whole else "in pieces"] += 1
        counts["mixed"] += step.num_decode > 0
        counts["whole, mixed"] += whole and step.num_decode > 0
        counts["whole, grouped"] += graph is not None and graph.prefixes is not None
        counts["whole, long"] += (
            graph is not None and graph.longest != SHORT and bucket.size <= FEW_TOKENS
        )
        counts["differ"] += not torch.equal(out[:rows], again)
        counts["not finite"] += not again.isfinite().all().item()
        counts["whole unlike pieces"] += bool(
            (again - in_pieces).abs().max() > 0.05 * in_pieces.abs().max()
        )

    prompts.replay = counted  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        prompts.replay = replay  # type: ignore[method-assign]
