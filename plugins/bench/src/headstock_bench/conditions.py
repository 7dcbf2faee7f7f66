"""The conditions of a benchmark: machine, versions, and the source that runs."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import attrs

import headstock
from headstock import LLM, EngineConfig
from headstock.llm import get_session
from headstock.startup import device
from headstock_bench.result import Conditions

NO_CONDITIONS = frozenset(
    "model revision load_format device attn cache_type scheduler runner ops opt proposer dtype "
    "kv_dtype page_size max_batch_tokens max_running_requests overlap tuned_choices "
    "memory_profiles defer_graphs record record_overwrite record_prompts log_level "
    "is_command".split()
)
"""Settings that are fields of `Conditions`, or that do not affect figures."""


def read_conditions(llm: LLM, *, version: str, shape: str, weights: str) -> Conditions:
    """The conditions of an engine in this process."""
    import torch

    session = get_session(llm)
    summary = session.engine.summary
    return Conditions(
        version=version,
        # Of the running source, not of the working directory.
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
        options=summary.options,
        batch=summary.max_running_requests,
        batch_tokens=session.config.max_batch_tokens,
        overlap=summary.overlap,
        page_size=summary.page_size,
        kv_dtype=summary.kv_dtype,
        proposer=summary.proposer,
        settings=list_settings(session.config),
        graph_tokens=max(summary.prompt_graphs, default=0),
    )


def list_settings(config: EngineConfig) -> dict[str, Any]:
    """The other settings that differ from the default."""
    default = EngineConfig()
    return {
        name: value
        for name, value in attrs.asdict(config, recurse=False).items()
        if name not in NO_CONDITIONS and value != getattr(default, name)
    }


def read_commit(file: Path) -> str | None:
    """The commit that `file` is at, with "-dirty" when the checkout has changes.

    None if git does not track the file, such as a package in an environment inside an unrelated
    checkout.
    """
    if run_git(file, "ls-files", "--error-unmatch", file.name) is None:
        return None
    # without tags, since git would name the nearest tag instead of the commit
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
