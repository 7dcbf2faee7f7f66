"""What a process has: objects of headstock's own classes, memory, threads and open files."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections import Counter
from pathlib import Path

from headstock.engine.engine import Engine
from headstock.engine.pacing import StepTimes
from headstock.record.recorder import NUM_REMEMBERED


def settle(engine: Engine) -> None:
    """Let an engine that has no work forget what it keeps for a while: prefixes, its last steps and
    their times.
    """
    engine.reset_prefix_cache()
    engine.pacer.times = StepTimes()
    for _ in range(NUM_REMEMBERED):
        engine.step()
    gc.collect()


def objects() -> dict[str, int]:
    """Live objects of headstock's own classes, by class."""
    kinds = Counter(map(type, gc.get_objects()))
    return {
        f"{kind.__module__}.{kind.__qualname__}": count
        for kind, count in kinds.items()
        if str(kind.__module__).startswith("headstock")
    }


def allocated() -> int:
    """Blocks of memory that Python's small objects take, those of other packages and array headers
    among them.
    """
    return sys.getallocatedblocks()


def resident() -> float:
    """Memory in use, MiB, without what the C library keeps for later where that is glibc; 0 where
    the system does not say.
    """
    try:
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
        return (
            int(Path("/proc/self/statm").read_text().split()[1])
            * os.sysconf("SC_PAGE_SIZE")
            / 2**20
        )
    except OSError:
        return 0.0


def threads_and_files() -> int:
    """Threads that run and files that are open."""
    folder = Path("/proc/self/fd")
    return threading.active_count() + (len(os.listdir(folder)) if folder.exists() else 0)
