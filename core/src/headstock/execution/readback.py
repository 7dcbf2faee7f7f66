"""From the device to the host, without delaying the steps that are launched next."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headstock.spi import Sample

_FIELDS = ("tokens", "healthy", "logprobs", "top_ids", "top_logprobs", "ranks", "pooled", "drafts")


class Readback:
    """A sample on its way to the host.

    The copies are queued at once, so that they run right behind the step. Queued later, they would
    run behind the steps launched since, and find the sample overwritten. Pinned memory is what
    lets the host go on while they run.
    """

    def __init__(self, sample: Sample, device: torch.device) -> None:
        copy = Tensor.clone if device.type == "cpu" else _copy_to_pinned
        copies: dict[str, Any] = {}
        for name in _FIELDS:
            tensor = getattr(sample, name)
            if tensor is not None:
                copies[name] = copy(tensor)
        self.sample = Sample(**copies)
        self.copied: Any = None
        if device.type != "cpu":
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.copied.record()

    @property
    def is_done(self) -> bool:
        """Whether the copies are complete."""
        return self.copied is None or bool(self.copied.query())

    def wait(self) -> Sample:
        """Wait for the copies and return the sample, its tensors in host memory."""
        # An event and not the stream: steps launched since would have to end too.
        if self.copied is not None:
            self.copied.synchronize()
        return self.sample


def _copy_to_pinned(tensor: Tensor) -> Tensor:
    """Copy to pinned host memory; the copy is complete once the device gets there."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
        tensor, non_blocking=True
    )
