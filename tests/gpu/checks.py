"""`headstock plugins check` on the GPU: which cases of the contract each plugin passes there.

    PYTHONPATH=tests:tests/support python -m gpu.checks [NAME ...]

It prints one JSON object; `ok` is False where a check ends otherwise than with 0. Each check has a
process of its own, as authors start it, and all run side by side: most of their time is compiling.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

NAMES = (
    *("sdpa", "fa", "fi", "trtllm", "attention:triton"),
    *("ops:torch", "ops:triton", "eager", "cudagraph"),
)
OPTIONS = {"ops:triton": ("--opt", "triton.packed=on", "--opt", "triton.chosen_experts=on")}
"""What a check needs to try every claim."""
MOST_SECONDS = 400


def main(builds: list[subprocess.Popen[bytes]], names: tuple[str, ...] = NAMES) -> dict[str, Any]:
    """What each check came to, once what it loads is compiled."""
    for build in builds:
        build.wait()
    with ThreadPoolExecutor(len(names)) as pool:
        found = dict(zip(names, pool.map(check, names), strict=True))
    return {"ok": all(each["code"] == 0 for each in found.values()), "checks": found}


def check(name: str) -> dict[str, Any]:
    """What a check came to: its exit code, how many cases ended how, and why those that failed."""
    began = time.monotonic()
    options = OPTIONS.get(name, ())
    command = (sys.executable, "-m", "headstock", "plugins", "check", name, *options)
    try:
        done = subprocess.run(
            [*command, "--device", "cuda", "--json"],
            capture_output=True,
            text=True,
            check=False,
            timeout=MOST_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {"code": None, "error": f"not done after {MOST_SECONDS} s"}
    seconds = round(time.monotonic() - began, 1)
    found: dict[str, Any] = {"code": done.returncode, "seconds": seconds}
    # At once: whoever stops this early keeps what is known.
    print(name, found, file=sys.stderr, flush=True)  # noqa: T201
    try:
        report = json.loads(done.stdout)
    except json.JSONDecodeError:
        return found | {"error": done.stderr[-2000:]}
    cases = report["cases"]
    return found | {
        "provided_by": report["provided_by"],
        "device": report["device"],
        "cases": dict(Counter(case["outcome"] for case in cases)),
        "failed": {case["case"]: case["reason"] for case in cases if case["outcome"] == "failed"},
        "not here": Counter(case["reason"] for case in cases if case["outcome"] == "not here"),
    }


if __name__ == "__main__":
    print(json.dumps(main([], tuple(sys.argv[1:]) or NAMES), indent=1))  # noqa: T201
