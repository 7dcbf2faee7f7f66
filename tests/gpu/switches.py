"""Every option of the kernels at its other value, alone and together: the demo model's answers stay
right, and each run has the graphs and cached tokens that it should have.

`GPU_SHARE` as in `gpu.share`. `GPU_ATTN=others` runs the backends besides `fa`, which compile their
kernels at the first use. Each run is a line of switches.jsonl in the folder `GPU_OUT`, where that
is given, as soon as it is made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
from gpu.share import take_share
from gpu.tokens import answer

SWITCHES = (
    "triton.small_linear=0",
    "triton.fused_linear=0",
    "triton.split_linear=0",
    "triton.large_linear=off",
    "triton.pdl=off",
    "fa.triton_rows=off",
    "fa.shared_prefix=off",
    "cudagraph.whole_rows=0",
)
"""What is on by itself, turned off."""
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    *({"opt": (switch,)} for switch in SWITCHES),
    {"opt": ("fa.shared_prefix=on",)},
    {"opt": ("fa.num_splits=1",)},
    {"opt": ("cudagraph.short_context=64", "cudagraph.mixed_context=64")},
    {"ops": "torch"},
    {"proposer": "ngram"},
    {"max_itl_ms": 0.2},
    {"late_planning": False},
    {"cuda_graph_max_tokens": 0},
    {"defer_graphs": False},
    {"opt": SWITCHES},
    {"opt": SWITCHES, "proposer": "ngram", "max_itl_ms": 0.2},
    {"opt": ("fa.shared_prefix=on",), "proposer": "ngram", "max_itl_ms": 0.2},
    {
        "opt": ("cudagraph.short_context=64", "cudagraph.mixed_context=64", "fa.shared_prefix=on"),
        "late_planning": False,
        "proposer": "ngram",
        "max_itl_ms": 0.2,
    },
)
# What these backends have to do with: ops, the pieces of prompts, drafts, chunks.
_OTHER_SWITCHES = tuple(each for each in SWITCHES if not each.startswith("fa."))
OTHERS: tuple[dict[str, Any], ...] = (
    {"attn": "fa,fi"},
    {"attn": "fa,fi", "opt": SWITCHES},
    {"attn": "fi"},
    {"attn": "fi", "opt": ("fi.prefill=fa2", "fi.tensor_cores=on")},
    {"attn": "fi", "opt": ("fi.tensor_cores=off", *_OTHER_SWITCHES)},
    {"attn": "fi", "ops": "torch"},
    {"attn": "fi", "proposer": "ngram", "max_itl_ms": 0.2, "late_planning": False},
    {"attn": "triton"},
    {"attn": "trtllm"},
    {"attn": "trtllm", "opt": _OTHER_SWITCHES},
    {"attn": "trtllm", "proposer": "ngram", "max_itl_ms": 0.2, "late_planning": False},
)
STEPS: tuple[dict[str, Any], ...] = (
    {"overlap": True, "max_batch_tokens": 256},
    {"overlap": False, "max_batch_tokens": 8192},
)
COMMON: dict[str, Any] = {"page_size": 64, "cache_type": "radix", "runner": "cudagraph"}


def main(builds: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """The answers with each of the settings, in small steps and in large ones."""
    runs: dict[str, Any] = {}
    chosen = OTHERS if os.environ.get("GPU_ATTN") == "others" else SETTINGS
    for settings, step in take_share(list(product(chosen, STEPS))):
        run = answer(**{"attn": "fa"} | COMMON | step | settings)
        run["ok"] = run["wrong"] == [] and "refused" not in run
        runs[f"{settings} {step}"] = run
        note(f"{settings} {step}", run)
        torch.cuda.synchronize()  # raises when a kernel has broken the device for good
    return {"ok": all(run["ok"] for run in runs.values()), "runs": runs}


def note(settings: str, run: dict[str, Any]) -> None:
    """Append a run to switches.jsonl in `GPU_OUT`, where that is given: time may end before all."""
    if "GPU_OUT" in os.environ:
        with (Path(os.environ["GPU_OUT"]) / "switches.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"settings": settings} | run, default=str) + "\n")


if __name__ == "__main__":
    found = main([])
    sys.stdout.write(json.dumps(found, indent=1, default=str))
    sys.exit(0 if found["ok"] else 1)
