"""Whether the tokens of a request depend on what runs beside it, counted over the demo model.

    python -m benchmarks.same_tokens [--output FILE]        (from the folder of tests)

Each prompt is answered alone, one after another, then all of them at once under several schedulers,
caches, page sizes, budgets and pools; half are greedy, half sampled with seeds of their own. A
difference is a request of which any token is another. Exit code 1 when there is one.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import torch

from headstock import LLM, SamplingParams

COUNT = 500
TOKENS = 32
ALONE = {"max_running_requests": 1, "cache_type": "naive", "overlap": False}
TOGETHER: dict[str, dict[str, Any]] = {
    "defaults": {},
    "prefill-first, 16 at once": {"scheduler": "prefill-first", "max_running_requests": 16},
    "decode-first, pages of 64": {"scheduler": "decode-first", "page_size": 64},
    "equal-length": {"scheduler": "equal-length"},
    "chunks of 64 tokens": {"max_batch_tokens": 64, "max_running_requests": 64},
    "pool of 400 pages, preempting": {"num_pages": 400},
    "one region a sequence": {"paged_attn": "off", "num_pages": 64},
}


def draw_prompts(rng: Random) -> list[list[int]]:
    """Random ids of 8 to 160 tokens; every second prompt begins as one of eight others do."""
    shared = [[rng.randrange(5, 500) for _ in range(96)] for _ in range(8)]
    prompts = []
    for number in range(COUNT):
        own = [rng.randrange(5, 500) for _ in range(rng.randint(8, 64))]
        prompts.append(rng.choice(shared) + own if number % 2 else own)
    return prompts


def draw_params(number: int) -> SamplingParams:
    """Greedy for even numbers, sampled at temperature 1 with a seed of its own for odd ones."""
    sampled = {"temperature": 1.0, "top_p": 0.95, "seed": number} if number % 2 else {}
    return SamplingParams(**({"temperature": 0.0} | sampled), max_tokens=TOKENS, ignore_eos=True)


def answer(settings: dict[str, Any]) -> list[tuple[int, ...]]:
    """The output tokens of every prompt under these settings, and how often one was preempted."""
    prompts = draw_prompts(Random(0))
    defaults = {"max_seq_len": 256, "num_pages": 4096, "device": "cpu"}
    with LLM("demo", **(defaults | settings)) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [draw_params(number) for number in range(COUNT)],
        )
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def main() -> int:
    """Print and write the record; 1 when any request's tokens differ."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    alone = answer(ALONE)
    differing = {}
    for name, settings in TOGETHER.items():
        together = answer(settings)
        differing[name] = sum(a != b for a, b in zip(alone, together, strict=True))
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dtype": "float32",
        "requests": COUNT,
        "tokens_each": TOKENS,
        "requests_that_differ": differing,
    }
    text = json.dumps(record, indent=1)
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n", encoding="utf-8")
    return int(any(differing.values()))


if __name__ == "__main__":
    sys.exit(main())
