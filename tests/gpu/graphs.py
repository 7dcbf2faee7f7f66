"""Replayed decode steps against the same steps computed operation by operation: bit for bit, for
hundreds of tokens.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch
from fault_injection import start_with_faults
from gpu.tokens import questions

from headstock import LLM, SamplingParams
from headstock.spi import Sample, Step
from headstock_cuda_graph.runner import CudaGraphRunner

SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "runner": "cudagraph",
    "num_pages": 4096,
    "max_running_requests": 32,
    "defer_graphs": False,
}
BACKENDS = ("fa", "fi", "trtllm", "triton")
BATCHES = (1, 3, 8, 17)
FAULTS = ("capture", "execute@40", "wait@40", "nan@40:1")


class Compared:
    """A runner's `replay_rows` that computes each replayed step once more, and counts where bits
    differ.
    """

    def __init__(self, runner: CudaGraphRunner) -> None:
        self.runner = runner
        self.replay_rows = runner.replay_rows
        self.steps: Counter[str] = Counter()
        runner.replay_rows = self  # type: ignore[method-assign]

    @torch.inference_mode()
    def __call__(self, step: Step) -> Sample | None:
        """What the replay sampled."""
        runner, count, step = self.runner, len(step.row_ids), step.grouped()
        wanted = runner.find_bucket(
            "rows", count, count
        )  # captures it, where captures are deferred
        before = {
            size: set(bucket.samplers) for size, bucket in runner.buckets.of_kind("rows").items()
        }
        sample = self.replay_rows(step)
        if sample is None or wanted is None:
            self.steps["left to run"] += 1
            return None
        bucket = wanted
        replayed = bucket.forward.result.clone()
        if step.groups is not None and bucket.shared is not None and runner.prefixes is not None:
            prefixes = runner.prefixes.first_rows(bucket.size)
            again = runner.forward_shared(bucket.inputs, prefixes, torch.empty_like(replayed))
            self.steps["grouped"] += 1
        else:
            again = runner.forward(bucket.inputs, bucket.plan)
        program = runner.program
        logits = [program.ops.lm_head(each[:count]) for each in (replayed, again)]
        self.steps["steps"] += 1
        self.steps["hidden states differ"] += not torch.equal(replayed[:count], again[:count])
        self.steps["logits differ"] += not torch.equal(*logits)
        self.steps["captured while serving"] += sum(
            len(bucket.samplers) - len(before.get(size, ()))
            for size, bucket in runner.buckets.of_kind("rows").items()
        )
        return sample


def bits(attn: str, batch: int, **more: Any) -> dict[str, Any]:
    """220 tokens of `batch` rows, greedy and sampled."""
    with LLM("demo", attn=attn, **SETTINGS | more) as llm:
        compared = Compared(llm._session.engine.executor.runner)
        for temperature in (0.0, 0.8):
            params = SamplingParams(
                temperature=temperature, seed=3, max_tokens=220, ignore_eos=True
            )
            llm.generate(["Once upon a time"] * batch, params)
        steps = dict(compared.steps)
    ok = (
        steps.get("steps", 0) >= 400
        and not steps["hidden states differ"]
        and not steps["logits differ"]
    )
    return {"ok": ok} | steps


def lengths(attn: str) -> dict[str, Any]:
    """One row across 512, 1,024 and 2,048 tokens: nothing is captured anew, nothing moves."""
    with LLM("demo", attn=attn, **SETTINGS | {"max_running_requests": 2}) as llm:
        runner = llm._session.engine.executor.runner

        def places() -> dict[int, tuple[int, int]]:
            return {
                n: (b.inputs.data_ptr(), b.forward.result.data_ptr())
                for n, b in runner.buckets.of_kind("rows").items()
            }

        before = places()
        compared = Compared(runner)
        params = SamplingParams(temperature=0.0, max_tokens=2100, ignore_eos=True)
        (output,) = llm.generate(["Once upon a time"], params)
        tokens = len(output.outputs[0].token_ids)
        same = before == places() and not compared.steps["captured while serving"]
    steps = dict(compared.steps)
    return {"ok": same and tokens == 2100 and not steps["logits differ"], "tokens": tokens} | steps


def failure(fault: str) -> dict[str, Any]:
    """A fault fails whom it hits, and the engine answers the same questions afterwards."""
    asked = questions()
    logging.disable(logging.CRITICAL)
    try:
        with LLM("demo", attn="fa", start=start_with_faults(fault), **SETTINGS) as llm:
            params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
            first = [
                output.outputs[0].finish_reason for output in llm.generate(list(asked), params)
            ]
            again = llm.generate(list(asked), SamplingParams(temperature=0, max_tokens=16))
            right = sum(
                output.outputs[0].text.startswith(answer)
                for output, answer in zip(again, asked.values(), strict=True)
            )
            notes = [note for note in llm._session.engine.summary.notes if "graph" in note]
    finally:
        logging.disable(logging.NOTSET)
    failed = first.count("error")
    wanted = {"capture": failed == 0, "nan@40:1": failed == 1}.get(fault, failed > 1)
    return {"ok": wanted and right == len(asked), "failed": failed, "right": right, "notes": notes}
