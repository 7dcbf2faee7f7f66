"""Work on another stream of the device, beside what the current one does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from headstock.spi import Sample


def is_capturing(like: Tensor) -> bool:
    """Whether what is launched goes into a graph of this tensor's device."""
    return like.is_cuda and torch.cuda.is_current_stream_capturing()


def launch_beside(work: Callable[[], Sample]) -> Callable[[], Sample]:
    """Launch work on another stream, after what the current one has done so far.

    What the work reads stays referenced, by who waits for it: memory that the current stream let go
    it would use again at once. What the work allocates, its own stream alone uses again, after
    another wait for the current one.

    returns: what makes the current stream wait for the work, and has its result
    """
    current, other = torch.cuda.current_stream(), _make_stream(torch.cuda.current_device())
    other.wait_stream(current)
    with torch.cuda.stream(other):
        result = work()

    def wait() -> Sample:
        current.wait_stream(other)
        return result

    return wait


@cache
def _make_stream(device: int) -> torch.cuda.Stream:
    """The other stream of a device."""
    return torch.cuda.Stream(device)
