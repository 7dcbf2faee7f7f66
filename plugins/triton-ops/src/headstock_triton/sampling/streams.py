"""Work on another stream of the device, beside what the current one does."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from attrs import define, field
from torch import Tensor


def is_capturing(like: Tensor) -> bool:
    """Whether what is launched goes into a graph of this tensor's device."""
    return like.is_cuda and torch.cuda.is_current_stream_capturing()


@cache
def _make_stream(device: int) -> torch.cuda.Stream:
    """The other stream of a device, whose few blocks go before the many that wait for the first
    one's kernels.
    """
    return torch.cuda.Stream(device, priority=-1)


@define
class Beside:
    """A context whose launches go to another stream, after what the current one has done so far.

    Whoever enters it keeps what the work reads until `wait`: memory that the current stream lets go
    it would use again at once. What the work allocates, its own stream alone uses again, after
    another wait for the current one.
    """

    current: torch.cuda.Stream = field(factory=torch.cuda.current_stream)
    other: torch.cuda.Stream = field(
        factory=lambda: _make_stream(torch.cuda.current_device()), init=False
    )
    context: AbstractContextManager[Any] = field(init=False)

    def __enter__(self) -> Beside:
        self.other.wait_stream(self.current)
        self.context = torch.cuda.stream(self.other)
        self.context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)

    def wait(self) -> None:
        """Make the first stream wait for the work."""
        self.current.wait_stream(self.other)
