"""Whether the tokens of a request depend on what runs beside it, counted over the demo model.

    PYTHONPATH=.:support python -m benchmarks.same_tokens [--output FILE]
                                                            (from the folder of tests)

Each prompt is answered alone, one after another, then all of them at once under several schedulers,
caches, page sizes, budgets and pools; half are greedy, half sampled with seeds of their own. A
difference is a request of which any token is another, with how far apart the two tokens are in
log-probability: sums of other shapes round otherwise, which only a tie closer than that can show.
Exit code 1 when a greedy answer differs by more than TIE.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import torch
from attrs import evolve
from step_watch import watch_steps

from headstock import LLM, CompletionOutput, SamplingParams

COUNT = 500
TIE = 1e-4
"""The most that rounding in float32 moves a log-probability here, ten times over."""

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
    "shared prefixes read once": {"opt": ("sdpa.shared_prefix=on",)},
    # A step on a CPU verifies the drafts of few rows.
    "drafts, 5 at once": {"proposer": "ngram", "max_running_requests": 5},
    "steps bounded to 1 ms": {"max_itl_ms": 1.0},
    "all three, overlapping": {
        "opt": ("sdpa.shared_prefix=on",),
        "proposer": "ngram",
        "max_running_requests": 5,
        "max_itl_ms": 1.0,
        "overlap": True,
    },
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


def generate(
    settings: dict[str, Any],
    numbers: Sequence[int],
    logprobs: int | None = None,
    counts: dict[str, int] | None = None,
) -> list[CompletionOutput]:
    """The answers to these prompts, all at once under these settings.

    writes: counts, what of the settings' work was done
    """
    prompts = draw_prompts(Random(0))
    defaults = {"max_seq_len": 256, "num_pages": 4096, "device": "cpu"}
    with LLM("demo", **(defaults | settings)) as llm:
        watched = watch_steps(llm._session.engine)
        outputs = llm.generate(
            [{"prompt_token_ids": prompts[number]} for number in numbers],
            [evolve(draw_params(number), logprobs=logprobs) for number in numbers],
        )
        stats = llm._session.engine.stats()
    if counts is not None:
        counts |= {
            "cached tokens": stats.cached_tokens,
            "preemptions": stats.preemptions,
            "steps that read shared pages once": watched["groups"],
            "accepted drafts": stats.accepted_draft_tokens,
            "changes of the bound on prompt tokens": watched["paced"],
        }
    return [output.outputs[0] for output in outputs]


def describe_difference(
    number: int, alone: CompletionOutput, together: CompletionOutput
) -> dict[str, Any]:
    """Where the tokens of a request differ first, and their log-probabilities alone."""
    pairs = zip(alone.token_ids, together.token_ids, strict=True)
    position = next(at for at, (one, other) in enumerate(pairs) if one != other)
    (again,) = generate(ALONE, [number], logprobs=20)
    assert again.logprobs is not None
    likeliest = again.logprobs[position]
    tokens = alone.token_ids[position], together.token_ids[position]
    found = [likeliest[token].logprob if token in likeliest else None for token in tokens]
    kind = "sampled" if number % 2 else "greedy"
    return {"request": number, "kind": kind, "position": position, "logprobs": found}


def is_more_than_a_tie(difference: dict[str, Any]) -> bool:
    """Whether a greedy answer took a token that rounding cannot have made the likelier one."""
    one, other = difference["logprobs"]
    far = one is None or other is None or abs(one - other) > TIE
    return bool(difference["kind"] == "greedy" and far)


def main() -> int:
    """Print and write the record; 1 when any greedy answer differs by more than a tie."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    numbers = range(COUNT)
    alone = generate(ALONE, numbers)
    differences: dict[str, list[dict[str, Any]]] = {}
    counts: dict[str, dict[str, int]] = {}
    for name, settings in TOGETHER.items():
        done = counts[name] = {}
        pairs = enumerate(zip(alone, generate(settings, numbers, counts=done), strict=True))
        differences[name] = [
            describe_difference(number, one, other)
            for number, (one, other) in pairs
            if one.token_ids != other.token_ids
        ]
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dtype": "float32",
        "requests": COUNT,
        "tokens_each": TOKENS,
        "answers": COUNT * len(TOGETHER),
        "equal": COUNT * len(TOGETHER) - sum(map(len, differences.values())),
        "differences": differences,
        "counts": counts,
    }
    text = json.dumps(record, indent=1)
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n", encoding="utf-8")
    return int(any(map(is_more_than_a_tie, chain.from_iterable(differences.values()))))


if __name__ == "__main__":
    sys.exit(main())
