"""Seconds from the death of a rank under load to the error of what is in flight, on GPUs.

    python3 -m gpu.lost_rank --out lost.jsonl [--one-gpu] [--runner cudagraph]

A rank that is killed leaves rank 0 with kernels that wait for it.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from headstock import LLM, EngineDied, SamplingParams

BEFORE = 0.4
"""Seconds of load before the rank is killed."""


def find_ranks() -> list[int]:
    """The processes of the other ranks."""
    found = subprocess.run(
        ["pgrep", "-f", "-P", str(os.getpid()), "headstock_multiprocess.follower"],
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(each) for each in found.stdout.split()]


def lose_rank(runner: str, opt: tuple[str, ...]) -> dict[str, Any]:
    """Kill a rank while its engine generates."""
    sizes = {"max_seq_len": 2048, "num_pages": 4096, "max_running_requests": 64}
    llm = LLM("demo", tp=2, attn="fa", runner=runner, device="cuda", opt=opt, **sizes)
    killed_at = 0.0

    def kill() -> None:
        nonlocal killed_at
        time.sleep(BEFORE)
        killed_at = time.perf_counter()
        os.kill(find_ranks()[0], signal.SIGKILL)

    params = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True)
    thread = threading.Thread(target=kill)
    thread.start()
    error = "none"
    try:
        llm.generate(["Once upon a time"] * 32, params, use_tqdm=False)
    except EngineDied as found:
        error = str(found)
    stats = llm._session.engine.stats()
    died = time.perf_counter() - killed_at
    began = time.perf_counter()
    llm.close()
    return {
        "runner": runner,
        "error": error[:200],
        "seconds": round(died, 2),
        "close_seconds": round(time.perf_counter() - began, 2),
        "steps": stats.executed_steps,
        "replayed": stats.replayed_steps,
    }


def main() -> int:
    """Lose a rank; 1 unless what was in flight failed within 5 s."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--one-gpu", action="store_true")
    parser.add_argument("--runner", default="cudagraph")
    parser.add_argument("--limit", type=int, default=100)
    asked = parser.parse_args()
    faulthandler.dump_traceback_later(asked.limit, exit=True)
    line = lose_rank(asked.runner, ("multiprocess.one_gpu=true",) if asked.one_gpu else ())
    with asked.out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
    return 0 if "rank 1" in line["error"] and line["seconds"] < 5 else 1


if __name__ == "__main__":
    raise SystemExit(main())
