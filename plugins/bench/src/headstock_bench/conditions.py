"""The conditions of a benchmark: machine, versions, and the source that runs."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import headstock
from headstock import LLM
from headstock.llm import get_session
from headstock.startup import device
from headstock_bench.result import Conditions


def read_conditions(llm: LLM, *, version: str, shape: str, weights: str) -> Conditions:
    """The conditions of an engine in this process."""
    import torch

    summary = get_session(llm).engine.summary
    return Conditions(
        version=version,
        # Of the source that runs, not of the folder where the command was given.
        commit=read_commit(Path(headstock.__file__)),
        gpu=None if summary.device == "cpu" else summary.device_name,
        cpu=device.read_cpu_name(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        python=platform.python_version(),
        shape=shape,
        weights=weights,
        dtype=summary.dtype,
        attn=summary.attention,
        cache=summary.cache,
        scheduler=summary.scheduler,
        runner=summary.runner,
        ops=summary.ops,
        batch=summary.max_running_requests,
        page_size=summary.page_size,
        kv_dtype=summary.kv_dtype,
        proposer=summary.proposer,
    )


def read_commit(file: Path) -> str | None:
    """The commit that `file` is at, with "-dirty" when the checkout has changes.

    None where git does not track the file: a package may lie in an environment that lies in the
    checkout of something else.
    """
    if run_git(file, "ls-files", "--error-unmatch", file.name) is None:
        return None
    # all tags are excluded, or git would name the nearest tag and not the commit
    return run_git(file, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def run_git(file: Path, *arguments: str) -> str | None:
    """The output of git in the folder of `file`; None when git fails or is not installed."""
    try:
        process = subprocess.run(
            ["git", "-C", str(file.parent), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() if process.returncode == 0 else None
