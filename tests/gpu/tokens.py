"""The demo model on the GPU: each pair of backends must give the right answers to sums and
questions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from step_watch import watch_steps

from headstock import LLM, SamplingParams
from headstock.errors import CannotRun

BACKENDS = ("sdpa", "fa", "fi", "trtllm")
REPLAYED = ("fa", "fi", "trtllm")
"""Decode backends that graphs can be made of."""
VARIANTS: tuple[dict[str, Any], ...] = tuple(
    # A small budget cuts prompts into chunks, so that steps mix them with decode rows.
    {
        "page_size": page,
        "cache_type": cache,
        "overlap": overlap,
        "runner": runner,
        "max_batch_tokens": budget,
    }
    for page in (16, 32, 64, 128)
    for cache in ("radix", "naive")
    for runner in ("cudagraph", "eager")
    for overlap, budget in ((True, 256), (False, 8192))
)
NAMES = ("Anna", "Ben", "Mia", "Theo", "Sara", "Hugo", "Lena", "Otto")
COMMANDS = (
    ("plugins", "inspect", "fa"),
    (
        "run",
        "--attn",
        "fa,fi",
        "--cache-type",
        "radix",
        "--prompt",
        "12 + 30 =",
        "--temperature",
        "0",
    ),
    ("run", "--prompt", "Once upon a time", "--temperature", "0", "--max-tokens", "60"),
)
SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "num_pages": 4096,
    "max_seq_len": 2048,
    "max_running_requests": 32,
}


def questions() -> dict[str, str]:
    """Prompt -> the only right beginning of its answer."""
    sums = {f"{12 + i} + {31 + 2 * i} =": f" {43 + 3 * i}." for i in range(16)}
    facts = [
        f"Remember: the number of the boat of {name} is {1234 + 707 * i}."
        for i, name in enumerate(NAMES)
    ]
    filler = [f"{a} + {b} = {a + b}." for a in range(20, 30) for b in range(5, 9)]
    # Two prefixes, so that steps have two groups of rows that share pages.
    told = ("\n".join([*facts, *filler]), "\n".join([*facts[::-1], *filler]))
    asked = "Question: what is the number of the boat of {}? Answer:"
    recalled = {
        f"{told[i % 2]}\n{asked.format(name)}": f" {1234 + 707 * i}."
        for i, name in enumerate(NAMES)
    }
    return sums | recalled


def main(builds: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """Every pair in every variant; graphs of a backend that has none must be refused, and nothing
    else may be.

    `GPU_PAIRS` names some pairs in place of all, parted by semicolons. Each run is a line of
    GPU_OUT/tokens.jsonl too, as soon as it is over. A device that is broken ends it all.
    """
    named = os.environ.get("GPU_PAIRS")
    every = [
        prompts if prompts == decode else f"{prompts},{decode}"
        for prompts in BACKENDS
        for decode in BACKENDS
    ]
    runs: dict[str, Any] = {}
    with (Path(os.environ.get("GPU_OUT", ".")) / "tokens.jsonl").open("a") as lines:
        for attn, more in (
            (attn, more) for attn in (named.split(";") if named else every) for more in VARIANTS
        ):
            refusal = more["runner"] == "cudagraph" and attn.split(",")[-1] not in REPLAYED
            run = answer(attn, **more)
            run["ok"] = run["wrong"] == [] and ("refused" in run) == refusal
            runs[f"{attn} {more}"] = run
            lines.write(json.dumps({"attn": attn} | more | run) + "\n")
            lines.flush()
            torch.cuda.synchronize()  # raises when a kernel has broken the device for good
    commands = {" ".join(words): command(*words) for words in COMMANDS}
    ok = all(run["ok"] for run in runs.values()) and all(
        each["code"] == 0 for each in commands.values()
    )
    return {"ok": ok, "runs": runs, "commands": commands}


def command(*words: str) -> dict[str, Any]:
    """What `headstock WORDS` does in a process of its own, and how long that takes."""
    began = time.monotonic()
    start = "import sys; from headstock.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", start, *words], capture_output=True, text=True, check=False
    )
    seconds = round(time.monotonic() - began, 2)
    return {
        "code": done.returncode,
        "seconds": seconds,
        "out": done.stdout[-2000:],
        "error": done.stderr[-2500:],
    }


def answer(attn: str, **more: Any) -> dict[str, Any]:
    """How a pair does at the questions, all at once."""
    asked = questions()
    began = time.monotonic()
    try:
        with LLM("demo", attn=attn, **SETTINGS | more) as llm:
            ready = time.monotonic()
            counts = watch_steps(llm._session.engine)
            outputs = llm.generate(list(asked), SamplingParams(temperature=0, max_tokens=16))
            seconds = time.monotonic() - ready
            graphs = sorted(getattr(llm._session.engine.executor.runner, "captured", ()))
            stats = llm._session.engine.stats()
            cached, drafts = stats.cached_tokens, stats.draft_tokens
            notes, page_size = (
                llm._session.engine.summary.notes,
                llm._session.engine.summary.page_size,
            )
    except CannotRun as error:
        return {"wrong": [], "refused": " ".join(str(error).split())[:400]}
    except Exception as error:
        return {"wrong": [f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"]}
    answers = [output.outputs[0] for output in outputs]
    wrong = [
        f"{prompt[-40:]!r} wanted {right!r}, got {each.text!r} {each.error or ''}"
        for (prompt, right), each in zip(asked.items(), answers, strict=True)
        if not each.text.startswith(right)
    ]
    if bool(graphs) != (more["runner"] == "cudagraph"):
        wrong.append(f"graphs of {graphs} rows")
    if bool(cached) != (more["cache_type"] == "radix") or page_size != more["page_size"]:
        wrong.append(f"{cached} cached tokens, pages of {page_size}")
    # Right answers prove nothing of what was not done.
    shares = any(each.endswith("shared_prefix=on") for each in more.get("opt", ()))
    if shares and not counts["groups"]:
        wrong.append("no step read shared pages once")
    if bool(drafts) != ("proposer" in more) or bool(counts["paced"]) != ("max_itl_ms" in more):
        wrong.append(f"{drafts} drafts, {counts['paced']} changes of the bound on prompt tokens")
    tokens = sum(len(each.token_ids) for each in answers)
    return {
        "wrong": wrong,
        "right": len(asked) - len(wrong),
        "tokens": tokens,
        "ready_s": round(ready - began, 2),
        "seconds": round(seconds, 3),
        "graphs": graphs,
        "cached": cached,
        "drafts": drafts,
        "counts": dict(counts),
        "notes": notes,
    }
