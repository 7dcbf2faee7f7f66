"""Tests of Triton kernels by Triton's interpreter, in processes of their own.

The interpreter is chosen by a variable that must be set before Triton is imported, and stays chosen
in that process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_interpreted(parts: Iterable[Path], which: str = "not full") -> None:
    """Run the tests of some files that have the markers; raises AssertionError if one fails.

    Files that run together import torch and Triton once.
    """
    # each of its tests
    limit = ("-o", "faulthandler_timeout=900", "-o", "faulthandler_exit_on_timeout=true")
    command = [
        sys.executable,
        "-m",
        "pytest",
        *map(str, parts),
        "-m",
        which,
        "-p",
        "no:cacheprovider",
        "--tb=short",
        *limit,
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
