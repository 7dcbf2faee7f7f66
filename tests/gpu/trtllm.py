"""TensorRT-LLM's kernels on the GPU against attention in float32, each group in a process of its
own.

`trtllm.py build OUT` compiles what they need and writes how long that took to
OUT/trtllm-builds.json; `trtllm.py prompts|decode|steps` tries one group and prints what it found as
JSON.
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
from attrs import asdict
from gpu.kernels import (
    Contestant,
    Findings,
    eight_bit,
    matrix,
    no_sync,
    replay,
    shape,
    three_replays_in_flight,
    three_steps_in_flight,
)

from headstock.spi import Phase

PROMPTS = Contestant("trtllm", (), (torch.bfloat16,), (Phase.PREFILL, Phase.EXTEND))
DECODE = Contestant("trtllm", (), (torch.bfloat16,), (Phase.DECODE,))
BOTH = Contestant("trtllm", (), (torch.bfloat16,))
GROUPS = ("prompts", "decode", "steps")
BUILDS = (
    "--head-dim 64 128 256 --ratio 2 --phase prefill decode",
    "--head-dim 128 --page-size 16 32 64 128 --ratio 1 2 4 7 --phase decode",
    "--head-dim 128 --ratio 2 --q-dtype float16 --kv-dtype float16 --phase decode",
    "--head-dim 128 --ratio 2 --kv-dtype float8_e4m3fn --phase decode",
)
"""What the groups need, as users would ask for it."""


def main(builds: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """What each group found; a group that dies says so and takes no other along."""
    codes = [build.wait() for build in builds]
    found = {group: run(group) for group in GROUPS}
    return {"ok": all(each.get("failed") == [] for each in found.values()), "builds": codes} | found


def run(group: str) -> dict[str, Any]:
    """One group in a process of its own."""
    began = time.monotonic()
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, __file__, group], capture_output=True, text=True, check=False, env=env
    )
    seconds = round(time.monotonic() - began, 1)
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        found = {"died": done.returncode, "out": done.stdout[-1500:]}
    return found | {"seconds": seconds, "said": done.stderr[-1500:]}


def prompts(found: Findings) -> None:
    """FMHA v2: fresh prompts and chunks after earlier tokens."""
    matrix(PROMPTS, found)
    for head_dim in (64, 256):
        shape(PROMPTS, found, head_dim=head_dim)


def decode(found: Findings) -> None:
    """XQA; float16 and 8-bit KV are for decode only."""
    matrix(DECODE, found)
    for head_dim in (64, 256):
        shape(DECODE, found, head_dim=head_dim)
    shape(DECODE, found, dtype=torch.float16)
    # That kernel copies pages whole, and rounds queries and probabilities to 8 bits as well.
    eight_bit(DECODE, found, tail=7.0, tolerance=0.1)


def steps(found: Findings) -> None:
    """Replays with other lengths and tables, no synchronization, several steps in flight."""
    for attempt in (replay, no_sync, three_steps_in_flight, three_replays_in_flight):
        found.attempt(BOTH, attempt.__name__, lambda attempt=attempt: attempt(BOTH))


def build(out: Path) -> int:
    """Compile, one command after the other.

    writes: out/trtllm-builds.json
    returns: an exit code
    """
    records = []
    for words in BUILDS:
        began = time.monotonic()
        command = [sys.executable, "-m", "headstock_trtllm.build", *words.split()]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = round(time.monotonic() - began, 1)
        records.append(
            {
                "asked": words,
                "code": done.returncode,
                "seconds": seconds,
                "out": done.stdout.splitlines(),
            }
        )
        records[-1]["error"] = done.stderr[-3000:]
        (out / "trtllm-builds.json").write_text(json.dumps(records, indent=1))
    return max(record["code"] for record in records)


if __name__ == "__main__" and sys.argv[1] == "build":
    sys.exit(build(Path(sys.argv[2])))
elif __name__ == "__main__":
    findings = Findings()
    {"prompts": prompts, "decode": decode, "steps": steps}[sys.argv[1]](findings)
    sys.stdout.write("\n" + json.dumps(asdict(findings)) + "\n")
