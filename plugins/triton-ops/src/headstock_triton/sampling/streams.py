"""Work on another stream of the device, beside what the current one does."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from attrs import define, field
from torch import Tensor


@cache
def _make_stream(device: int) -> torch.cuda.Stream:
    """The other stream of a device, whose few blocks go before the many that wait for the first
    one's kernels.
    """
    return torch.cuda.Stream(device, priority=-1)


@define
class Beside:
    """A context whose launches a capture records on another stream, after what the current one has
    done so far; without a capture, where launches take the time, they stay where they are.

    Whoever enters it keeps what the work reads until `wait`: memory that the current stream lets go
    it would use again at once. What the work allocates, its own stream alone uses again, after
    another wait for the current one.

    current, other: the two streams; None where there is one
    """

    current: torch.cuda.Stream | None = None
    other: torch.cuda.Stream | None = None
    context: torch.cuda.StreamContext | None = field(default=None, init=False)
    marked: torch.cuda.Event | None = field(default=None, init=False)

    @classmethod
    def of(cls, like: Tensor) -> Beside:
        """Make a context for work on this tensor's device."""
        if not like.is_cuda or not torch.cuda.is_current_stream_capturing():
            return cls()
        return cls(torch.cuda.current_stream(), _make_stream(torch.cuda.current_device()))

    def __enter__(self) -> Beside:
        if self.current is not None and self.other is not None:
            self.other.wait_stream(self.current)
            self.context = torch.cuda.stream(self.other)
            self.context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.context is not None:
            self.context.__exit__(*error)

    @property
    def is_active(self) -> bool:
        """Whether there are two streams."""
        return self.other is not None

    def mark(self) -> None:
        """Let `wait_for_mark` wait for the work until here."""
        if self.other is not None:
            self.marked = self.other.record_event()

    def wait_for_mark(self) -> None:
        """Make the first stream wait for the work until its mark."""
        if self.current is not None and self.marked is not None:
            self.current.wait_event(self.marked)

    def wait(self) -> None:
        """Make the first stream wait for the work."""
        if self.current is not None and self.other is not None:
            self.current.wait_stream(self.other)
