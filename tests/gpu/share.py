"""Parts of a part of `run.py`, for several processes on one device.

    GPU_SHARE=0/4 PYTHONPATH=tests:tests/support python -m gpu.switches

Most of the time of `switches` and `ops` goes to compilers, which have one core each.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def take_share(items: Sequence[T]) -> Sequence[T]:
    """Every n-th of the items from the i-th on, by `GPU_SHARE=i/n`; all of them without it.

    raises: ValueError for a share that does not exist
    """
    first, count = map(int, os.environ.get("GPU_SHARE", "0/1").split("/"))
    if not 0 <= first < count:
        raise ValueError(f"GPU_SHARE is {first}/{count}; wanted 0/{count} to {count - 1}/{count}")
    return items[first::count]
