"""Masks and logits processors on the GPU: right, and what they cost the rows without one.

    python -m gpu.rules

It prints one JSON object. `ok` is False where a kernel or a bound fails. Sampling of 256 rows is
replayed as a graph in every kind, at the vocabulary of the 0.6B shape. Shares are of `STEP_MS`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import sampling_cases
import torch
from attrs import evolve
from gpu.op_times import DEVICE, VOCAB
from sampling_cases import SETTINGS
from torch import Tensor

from headstock import LLM, SamplingParams
from headstock.spi import LogitColumn, LogitsProcessor, Processing, Sample, Sampling
from headstock_triton.sampler import fused_sample

ROWS, FEW = 256, 8
MOST_SHARE = 0.01
"""What 8 rows with a rule may add to a step of 256."""


class Near(LogitsProcessor):
    """Keeps scores near the best one, as docs/examples/logits-plugin does."""

    @property
    def columns(self) -> Mapping[str, LogitColumn]:
        """By how much."""
        return {"reach": LogitColumn(neutral=1e9)}

    @property
    def changes_argmax(self) -> bool:
        """The best token stays."""
        return False

    def row(self, args: Any, prompt: Any, vocab: int) -> None:
        """Never called."""

    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """Drop the others."""
        spread = logits.std(-1, keepdim=True)
        floor = logits.amax(-1, keepdim=True) - columns["reach"][:, None] * spread
        return logits.masked_fill_(logits < floor, -torch.inf)


def masks(rows: int, ruled: int, vocab: int) -> Tensor:
    """Masks of which the first few ban half of the tokens."""
    mask = torch.full((rows, -(-vocab // 32)), -1, dtype=torch.int32, device=DEVICE)
    mask[:ruled] = 0x55555555
    return mask


def check_kernels() -> dict[str, str]:
    """Masked sampling is torch's, in every type and shape."""
    failed = {}
    for name, settings in SETTINGS.items():
        for rows, vocab in ((1, VOCAB), (9, 4099), (64, VOCAB), (17, 37)):
            for dtype in (torch.bfloat16, torch.float32):
                mask = masks(rows, max(rows // 2, 1), vocab)
                try:
                    share = sampling_cases.sampling_case(
                        rows, vocab, dtype, DEVICE, settings, mask=mask
                    )
                    assert share < 0.05
                except AssertionError as error:
                    failed[f"{name}, {rows} rows of {vocab}, {dtype}"] = str(error)[:300]
    return failed


def check_processed() -> dict[str, str]:
    """In replays, rows with a processor get the tokens that they get alone, and the others those
    of a step without processors.
    """
    failed = {}
    which = torch.arange(FEW, device=DEVICE) * 7
    reach = {"reach": torch.full((FEW,), 3.0, device=DEVICE)}
    for name, settings in SETTINGS.items():
        if name == "greedy":
            continue  # `Near` leaves the best token in its place
        logits = torch.randn(ROWS, VOCAB, device=DEVICE).to(torch.bfloat16)
        plain = sampling_cases.sampling_of(ROWS, DEVICE, settings)
        wanted = fused_sample(logits.clone(), plain).tokens
        alone = Processing(rows=None, parts=((Near(), reach),))
        wanted[which] = fused_sample(
            logits[which], evolve(plain.take(which), processing=alone)
        ).tokens
        beside = evolve(plain, processing=Processing(rows=which, parts=((Near(), reach),)))
        held = logits.clone()
        graph, sample = capture(lambda: fused_sample(held, beside, pdl=True))  # noqa: B023
        for _ in range(3):
            held.copy_(logits)
            sample.tokens.fill_(-1)
            graph.replay()
            wrong = int((sample.tokens != wanted).sum())
            if wrong:
                failed[f"{name}, few processed"] = f"{wrong} of {ROWS} tokens differ"
    return failed


def capture(work: Callable[[], Sample]) -> tuple[torch.cuda.CUDAGraph, Sample]:
    """A graph of the work, and what its replays fill."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            result = work()
    return graph, result


def replay_microseconds(sampling: Sampling, logits: Tensor) -> float:
    """Median microseconds of sampling as a graph."""
    graph, _ = capture(lambda: fused_sample(logits, sampling, pdl=True))
    times = []
    for _ in range(30):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(10):
            graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) * 100)
    return statistics.median(times)


def time_sampling() -> dict[str, float]:
    """Microseconds of sampling 256 rows, plain and with rules for 8 of them."""
    logits = torch.randn(ROWS, VOCAB, device=DEVICE).to(torch.bfloat16)
    which = torch.arange(FEW, device=DEVICE) * 7
    reach = {"reach": torch.full((FEW,), 3.0, device=DEVICE)}
    everyone = {"reach": torch.full((ROWS,), 1e9, device=DEVICE)}
    rules: dict[str, dict[str, Any]] = {
        "plain": {},
        "mask": {"mask": masks(ROWS, FEW, VOCAB)},
        "few processed": {"processing": Processing(rows=which, parts=((Near(), reach),))},
        "mask, few processed": {
            "mask": masks(ROWS, FEW, VOCAB),
            "processing": Processing(rows=which, parts=((Near(), reach),)),
        },
        "all processed": {"processing": Processing(rows=None, parts=((Near(), everyone),))},
    }
    return {
        f"{kind}, {name}": replay_microseconds(
            sampling_cases.sampling_of(ROWS, DEVICE, SETTINGS[kind], **more), logits.clone()
        )
        for kind in ("greedy", "temperature")
        for name, more in rules.items()
        if kind != "greedy" or "process" not in name
    }


def time_steps() -> dict[str, float]:
    """Milliseconds of a token of the demo model at 256 streams: of those without a grammar, beside
    none and 8 with one; then where all have one.
    """
    grammar = {"regex": "[a-z]{1,400}"}
    prompts = [{"prompt_token_ids": list(range(5, 69))}] * ROWS
    plain = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
    ruled = SamplingParams(temperature=0.0, max_tokens=128, structured_outputs=grammar)
    found = {}
    with LLM("demo", max_running_requests=ROWS, defer_graphs=False) as llm:
        for _ in range(2):
            for name, count in (
                ("plain", 0),
                ("8 with a grammar", FEW),
                ("all with a grammar", ROWS),
            ):
                params = [ruled] * count + [plain] * (ROWS - count)
                outputs = llm.generate(prompts, params)
                ends = [each.metrics for each in outputs[count:] or outputs]
                took = statistics.median((e.end or 0) - (e.first_token or 0) for e in ends)
                found[name] = took * 1000 / 127
    return found


STEP_MS = 4.0
"""A decode step of 256 rows of the 0.6B shape, which step_time.py measures."""


def main(builds: list[object]) -> dict[str, Any]:
    """Right or wrong, and microseconds; see the module."""
    failed = check_kernels() | check_processed()
    sampling = time_sampling()
    added = {
        name: sampling[name] - sampling[f"{name.partition(', ')[0]}, plain"]
        for name in sampling
        if not name.endswith(("plain", "all processed"))
    }
    shares = {name: value / (STEP_MS * 1000) for name, value in added.items()}
    slow = {name: share for name, share in shares.items() if share > MOST_SHARE}
    return {
        "ok": not failed and not slow,
        "failed": failed,
        "sampling_us": sampling,
        "added_share_of_a_step": shares,
        "demo_ms_a_token": time_steps() if find_spec("llguidance") else "no llguidance",
        "device": torch.cuda.get_device_name(),
    }


if __name__ == "__main__":
    print(json.dumps(main([]), indent=1))  # noqa: T201
