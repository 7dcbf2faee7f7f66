"""Checks of the machine: memory, locale, caches."""

from __future__ import annotations

import locale
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from headstock.doctor.finding import Finding, fail_finding, pass_finding, warn_finding
from headstock.startup.host_memory import read_container_memory, read_host_memory

LITTLE_MEMORY = 2 * 2**30
"""Bytes of free memory below which even a small model may not fit."""


def check_memory() -> Iterator[Finding]:
    """Check how much memory the host has free, within a container's limit."""
    host, container = read_host_memory(), read_container_memory()
    free, total = host.free, host.total
    # a limit above what the host has limits nothing
    if container is not None and container.total < host.total:
        free, total = min(host.free, container.free), container.total
    text = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    if free < LITTLE_MEMORY:
        yield warn_finding(
            "memory", text, "close other programs, or lower --num-pages and --max-batch-tokens"
        )
    else:
        yield pass_finding("memory", text)


def check_encoding() -> Iterator[Finding]:
    """Check that text goes out as UTF-8."""
    names = {
        "locale": locale.getpreferredencoding(False),
        "output": getattr(sys.stdout, "encoding", None) or "utf-8",
    }
    text = ", ".join(f"{where} {name}" for where, name in names.items())
    if all(name.lower().replace("-", "") == "utf8" for name in names.values()):
        yield pass_finding("encoding", text)
    else:
        yield warn_finding(
            "encoding", text, "set PYTHONUTF8=1, or LC_ALL=C.UTF-8, to print text of every language"
        )


def check_hub() -> Iterator[Finding]:
    """Check where models from the Hugging Face hub are kept, and whether they may be downloaded."""
    folder = _hub_folder()
    # Before the first download there is no cache: check the folder in which it will be made.
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield fail_finding(
            "cache", f"{folder} cannot be written", "set HF_HOME to a folder that can"
        )
    else:
        yield pass_finding("cache", f"{folder} can be written")
    offline = [
        name
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        if _is_on(os.environ.get(name, ""))
    ]
    if offline:
        yield warn_finding(
            "hub",
            f"{' and '.join(offline)} set: only models already in the cache",
            "unset to download models",
        )
    else:
        yield pass_finding("hub", "models may be downloaded")


def _hub_folder() -> Path:
    """The folder that huggingface_hub keeps models in."""
    # Its rules again, because importing it takes half a second.
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    home = os.environ.get("HF_HOME") or str(Path(cache) / "huggingface")
    folder = os.environ.get("HF_HUB_CACHE") or str(Path(home) / "hub")
    return Path(os.path.expanduser(folder)).absolute()


def _is_on(text: str) -> bool:
    """Whether huggingface_hub takes the text as true."""
    return text.upper() in {"1", "ON", "YES", "TRUE"}
