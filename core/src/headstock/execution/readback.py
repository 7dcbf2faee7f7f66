"""From the device to the host, without holding up what is launched next."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstock.spi import Sample

FIELDS = ("tokens", "healthy", "logprobs", "top_ids", "top_logprobs")


class Readback:
    """A sample on its way to the host.

    The copies are asked for at once and go to pinned memory, so that they come right after the step
    in the device's order of work: asked for later, they would wait for the steps launched since,
    and find the sample overwritten.
    """

    def __init__(self, sample: Sample, device: torch.device) -> None:
        fields = ((name, getattr(sample, name)) for name in FIELDS)
        self.tensors: dict[str, Tensor] = {
            name: tensor for name, tensor in fields if tensor is not None
        }
        self.done: Any = None
        if device.type == "cpu":
            self.tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        else:
            self.tensors = {name: pinned(tensor) for name, tensor in self.tensors.items()}
            self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.done.record()

    def wait(self) -> dict[str, np.ndarray]:
        """The sample's fields as host arrays, those that nobody asked for left out; blocks until
        they are there.
        """
        if self.done is not None:
            self.done.synchronize()
        return {name: tensor.numpy() for name, tensor in self.tensors.items()}


def pinned(tensor: Tensor) -> Tensor:
    """A copy in pinned host memory, complete once the device gets there."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
        tensor, non_blocking=True
    )
