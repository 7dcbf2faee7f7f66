"""How much memory the host and its container have left. Importing it does not import torch."""

from __future__ import annotations

import os
from pathlib import Path

from attrs import frozen

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_PROCESS_STATUS = Path("/proc/self/status")


@frozen
class MemoryBounds:
    """Bytes that can still be used, and bytes in all."""

    free: int
    total: int


def read_host_memory(path: Path = _MEMINFO) -> MemoryBounds:
    """Read the memory of the host.   raises: OSError where /proc is not mounted"""
    fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    free, total = (int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    return MemoryBounds(free, total)


def read_container_memory(folder: Path = _CGROUP) -> MemoryBounds | None:
    """Read the memory of the container (cgroup version 2); None when it has no limit."""
    try:
        limit, used = (
            (folder / name).read_text().strip() for name in ("memory.max", "memory.current")
        )
    except OSError:
        return None
    # memory.max is the word "max" where there is no limit
    if not limit.isdecimal() or not used.isdecimal():
        return None
    return MemoryBounds(max(int(limit) - int(used), 0), int(limit))


def unwritten_bytes(status: Path = _PROCESS_STATUS) -> int:
    """Count the bytes that this process has allocated and not yet written.

    Linux hands pages out at the first write, so MemAvailable still counts these bytes as free.
    Most of them are the unused rest of another engine's pool.
    """
    try:
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        data, resident, swapped = (
            int(fields[name].split()[0]) for name in ("VmData", "RssAnon", "VmSwap")
        )
    except (OSError, KeyError):
        return 0  # not Linux
    return max(data - resident - swapped, 0) * 1024


def total_host_bytes() -> int:
    """Count the bytes that the host has, or its container if that has fewer."""
    try:
        total = read_host_memory().total
    except (OSError, KeyError):  # not Linux
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    container = read_container_memory()
    return total if container is None else min(total, container.total)


def free_host_bytes() -> int:
    """Count the bytes that this process can still take, in the host and in the container."""
    try:
        free = read_host_memory().free
    except (OSError, KeyError):  # not Linux
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    container = read_container_memory()
    if container is not None:
        free = min(free, container.free)
    # Two engines in one process: the first one's pool is taken but not yet written.
    return max(free - unwritten_bytes(), 0)
