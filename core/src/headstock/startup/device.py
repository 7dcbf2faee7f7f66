"""The device that the engine runs on."""

from __future__ import annotations

import gc
import platform
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch

from headstock.distributions import read_distributions, read_path_times
from headstock.errors import CannotRun, EngineDied, format_count
from headstock.spi import DeviceEnv
from headstock.startup.host_memory import free_host_bytes, total_host_bytes


def describe_device(requested: str) -> DeviceEnv:
    """Describe the machine for `requested` ("auto", "cpu" or "cuda").

    raises: CannotRun if CUDA is requested and not available
    """
    installed = read_versions()
    cuda = requested != "cpu" and torch.cuda.is_available()
    if requested == "cuda" and not cuda:
        raise CannotRun(
            f"device (--device) cuda: torch {torch.__version__} finds no CUDA device; set it to "
            "cpu, or install a CUDA build of torch (see the README)"
        )
    if not cuda:
        return DeviceEnv(
            device="cpu",
            name=f"CPU, {format_count(torch.get_num_threads(), 'thread')}",
            memory_bytes=total_host_bytes(),
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


def name_device_kind(env: DeviceEnv) -> str:
    """What two machines must have in common for equal results: the GPU, or a CPU's instructions."""
    return env.name if env.device == "cuda" else f"CPU, {torch.backends.cpu.get_cpu_capability()}"


def read_versions() -> dict[str, str]:
    """The version of each installed distribution, by name."""
    return dict(_read_versions(read_path_times()))


# Each start asks, and a scan of 200 distributions takes 10 to 50 ms.
@lru_cache(maxsize=1)
def _read_versions(path_times: tuple[tuple[str, int], ...]) -> Mapping[str, str]:
    """The versions, read again where `path_times` say that something was installed."""
    return {each.name: each.version for each in read_distributions() if each.name}


def read_cpu_name() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []  # a system without /proc
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def wait_for_stream() -> None:
    """Wait for what this thread has launched on the GPU.   raises: RuntimeError of lost devices"""
    # Not for the whole device: CUDA refuses that while another engine of this process captures.
    torch.cuda.current_stream().synchronize()


def check_usable(env: DeviceEnv) -> None:
    """Check that the device still serves this process.

    After an illegal access every later call fails too.

    raises: EngineDied
    """
    if env.device != "cuda":
        return
    # Any call would do; this one also waits for the kernel that may be at fault.
    try:
        wait_for_stream()
    except RuntimeError as error:
        first_line = str(error).split("\n", 1)[0]
        raise EngineDied(
            f"the GPU is lost to this process ({first_line}); the log has the step that failed"
        ) from error


def reclaim_free_bytes(device: torch.device) -> int:
    """Count the bytes that are free once this process has returned what closed engines held."""
    # torch keeps the memory of freed tensors: an engine that was closed leaves it all. The first
    # start of a process has none, and spares a full collection, which takes 0.1 to 0.2 s.
    if device.type == "cuda" and torch.cuda.memory_reserved(device):
        gc.collect()
        torch.cuda.empty_cache()
    return free_bytes(device)


def free_bytes(device: torch.device) -> int:
    """Count the bytes that are free on the device, or that this process can still take on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes()
