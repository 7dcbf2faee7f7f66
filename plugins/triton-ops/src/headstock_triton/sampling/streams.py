"""Work on another stream of the device, next to the current one."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from attrs import define, field
from torch import Tensor


@cache
def _make_stream(device: int) -> torch.cuda.Stream:
    """The other stream of a device, whose few blocks run before the many queued blocks of the
    first.
    """
    return torch.cuda.Stream(device, priority=-1)


@define
class Beside:
    """A context whose launches a capture records on another stream, after the current one's work so
    far; without a capture, where launches dominate, they stay on the current stream.

    Callers must keep the inputs of the work until `wait`: the current stream would reuse freed
    memory at once. Memory that the work allocates is only reused by its own stream, after another
    wait for the current one.

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
        """Let `wait_for_mark` wait for the work up to this point."""
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
