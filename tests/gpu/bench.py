"""`headstock bench` as users call it, for each choice of backends; the figures go to one file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

WORKLOADS = ("offline256", "single", "prefix256", "prefill32x4k")
START = "import sys; from headstock.cli.main import main; sys.exit(main(sys.argv[1:]))"


def main(builds: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """The figures of every run that `GPU_BENCH` names, `SHAPE:ATTN:WORKLOADS:RUNS:more flags` each.

    Runs are parted by semicolons, workloads by commas or "all".
    """
    for build in builds:
        build.wait()
    found: dict[str, Any] = {"ok": True, "runs": {}}
    for text in os.environ.get("GPU_BENCH", "qwen3-0.6b:fa,fi:all:3:").split(";"):
        shape, attn, workloads, runs, flags = text.split(":")
        names = WORKLOADS if workloads == "all" else tuple(workloads.split(","))
        words = (
            "bench",
            *names,
            "--shape",
            shape,
            "--attn",
            attn,
            "--runs",
            runs,
            "--json",
            *flags.split(),
        )
        found["runs"][text] = bench(words)
    return found | {"ok": all(run["code"] == 0 for run in found["runs"].values())}


def bench(words: tuple[str, ...]) -> dict[str, Any]:
    """The figures of one process, and what it said."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", START, *words], capture_output=True, text=True, check=False
    )
    figures = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for figure in figures:
        sys.stderr.write(
            f"{' '.join(words)}: {figure['workload']}: {figure['out_tok_s']:.0f} out/s\n"
        )
    return {
        "code": done.returncode,
        "seconds": round(time.monotonic() - began, 1),
        "figures": figures,
        "said": done.stderr[-3000:],
    }
