"""From the device to the host, without delaying the steps that are launched next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headstock.spi import Sample

_SAMPLE_FIELDS = (
    *("tokens", "healthy", "logprobs", "top_ids", "top_logprobs", "ranks", "pooled", "verified"),
)


class Readback:
    """Tensors on their way to the host.

    The copies are queued at once, so that they run right behind the step. Queued later, they would
    run behind the steps launched since, and find the tensors overwritten. Pinned memory is what
    lets the host go on while they run.
    """

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        copy = Tensor.clone if device.type == "cpu" else _copy_to_pinned
        self.copies = {name: copy(tensor) for name, tensor in tensors.items()}
        self.copied: Any = None
        if device.type != "cpu":
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.copied.record()

    @property
    def is_done(self) -> bool:
        """Whether the copies are complete."""
        return self.copied is None or bool(self.copied.query())

    @classmethod
    def of_sample(cls, sample: Sample, device: torch.device) -> Readback:
        """The tensors of a sample."""
        tensors = {name: getattr(sample, name) for name in _SAMPLE_FIELDS}
        return cls({name: each for name, each in tensors.items() if each is not None}, device)

    def wait(self) -> Mapping[str, Tensor]:
        """Wait for the copies and return them, in host memory."""
        # An event and not the stream: steps launched since would have to end too.
        if self.copied is not None:
            self.copied.synchronize()
        return self.copies


def _copy_to_pinned(tensor: Tensor) -> Tensor:
    """Copy to pinned host memory; the copy is complete once the device gets there."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
        tensor, non_blocking=True
    )
