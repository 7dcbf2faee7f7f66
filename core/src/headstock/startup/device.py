"""The device that the engine runs on."""

from __future__ import annotations

import os
from importlib.metadata import distributions
from pathlib import Path

import torch

from headstock.errors import CannotRun, EngineDied, format_count
from headstock.spi import DeviceEnv


def describe_device(requested: str) -> DeviceEnv:
    """The machine for `asked` ("auto", "cpu" or "cuda").

    raises: CannotRun when CUDA is asked for and there is none
    """
    # once each: every look at a distribution parses its metadata
    packages = [dist.metadata for dist in distributions()]
    installed = {metadata["Name"]: metadata["Version"] for metadata in packages if metadata["Name"]}
    cuda = requested != "cpu" and torch.cuda.is_available()
    if requested == "cuda" and not cuda:
        raise CannotRun(
            f"--device cuda: torch {torch.__version__} finds no CUDA device; use --device cpu, or "
            "install a CUDA build of torch (see the README)"
        )
    if not cuda:
        return DeviceEnv(
            device="cpu",
            name=f"CPU, {format_count(torch.get_num_threads(), 'thread')}",
            memory_bytes=free_bytes(torch.device("cpu")),
            torch=torch.__version__,
            distributions=installed,
        )
    properties = torch.cuda.get_device_properties(0)
    return DeviceEnv(
        device="cuda",
        capability=(properties.major, properties.minor),
        name=properties.name,
        memory_bytes=properties.total_memory,
        torch=torch.__version__,
        cuda=torch.version.cuda,
        distributions=installed,
    )


def check_usable(env: DeviceEnv) -> None:
    """Ask the device whether it still serves this process: after an illegal access, say, no call
    ever does.

    raises: EngineDied
    """
    if env.device != "cuda":
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        first_line = str(error).split("\n", 1)[0]
        raise EngineDied(
            f"the GPU is lost to this process ({first_line}); the log has the step that failed"
        ) from error


def free_bytes(device: torch.device) -> int:
    """Memory that is free on the device now, in bytes; on a CPU what is available and not promised
    to this process.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return max(
        min(free for free in (available_bytes(), container_free_bytes()) if free is not None)
        - unwritten_bytes(),
        0,
    )


def unwritten_bytes(status: Path = Path("/proc/self/status")) -> int:
    """What this process has allocated and not yet written, in bytes: the rest of another engine's
    pool, above all.
    """
    try:
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        data, resident, swapped = (
            int(fields[name].split()[0]) for name in ("VmData", "RssAnon", "VmSwap")
        )
    except (OSError, KeyError):
        return 0  # not Linux
    return max(data - resident - swapped, 0) * 1024


def available_bytes() -> int:
    """What the system says can still be taken, in bytes."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def container_free_bytes(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What is left of the memory limit of the container, in bytes; None when there is no limit
    (cgroup version 2).
    """
    try:
        limit, used = (
            (folder / name).read_text().strip() for name in ("memory.max", "memory.current")
        )
    except OSError:
        return None
    return max(int(limit) - int(used), 0) if limit.isdecimal() and used.isdecimal() else None
