"""Two ranks of one host beside one: the same tokens, for every pair of backends, replayed or not.

    python3 -m gpu.ranks --out ranks.jsonl [--device cpu] [--pairs fa fa,fi fi sdpa]

The demo model, whose weights are real, in float32 where a backend serves that, else in bfloat16.
Greedy tokens may differ only where the two best are closer than rounding.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from headstock import LLM, SamplingParams

PROMPTS = [
    f"{opening} {name} had {count} apples and" for opening in ("Once upon a time", "One morning")
    for name in ("Anna", "Ben", "Mia", "Theo", "Sara") for count in (2, 3, 5, 9)
]  # fmt: skip
MAX_TOKENS = 48
TIE = 0.06
"""A margin between the two best tokens, in logits, under which bfloat16 may fall on either side."""


def answer(tp: int, device: str, **settings: Any) -> tuple[list[Any], float, float]:
    """The outputs of all prompts, and the seconds of the start and of the answers."""
    began = time.perf_counter()
    sizes = {"max_seq_len": 512, "num_pages": 512, "max_running_requests": 64, "device": device}
    with LLM("demo", tp=tp, **sizes, **settings) as llm:
        started = time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        ended = time.perf_counter()
    return [output.outputs[0] for output in outputs], started - began, ended - started


def count_differences(found: list[Any], expected: list[Any]) -> tuple[int, int]:
    """How many answers part at a tie, and how many where there is none."""
    ties = wrong = 0
    for ours, theirs in zip(found, expected, strict=True):
        pairs = enumerate(zip(ours.token_ids, theirs.token_ids, strict=True))
        at = next((at for at, (one, other) in pairs if one != other), None)
        if at is None:
            continue
        best, second = sorted(each.logprob for each in theirs.logprobs[at].values())[-1:-3:-1]
        ties += best - second < TIE
        wrong += best - second >= TIE
    return ties, wrong


def main() -> int:
    """Compare each pair of backends, eager and replayed; 1 if a token is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", nargs="+", default=["fa", "fa,fi", "fi", "sdpa"])
    asked = parser.parse_args()
    num_wrong = 0
    runners = ("eager",) if asked.device == "cpu" else ("eager", "cudagraph")
    for attn in asked.pairs:
        for runner in runners:
            settings = {"attn": attn, "runner": runner}
            line: dict[str, Any] = {**settings, "ranks": asked.ranks}
            try:
                alone, *alone_seconds = answer(1, asked.device, **settings)
                found, *seconds = answer(asked.ranks, asked.device, **settings)
            except Exception as error:
                line["error"] = f"{type(error).__name__}: {error}"[:400]
                num_wrong += 1
            else:
                ties, wrong = count_differences(found, alone)
                num_wrong += wrong
                line |= {"answers": len(found), "ties": ties, "wrong": wrong}
                line |= {"seconds": [round(each, 2) for each in seconds]}
                line |= {"seconds_alone": [round(each, 2) for each in alone_seconds]}
            with asked.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            sys.stdout.write(json.dumps(line) + "\n")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
