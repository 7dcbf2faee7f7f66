"""Copies from host arrays to the static inputs of graphs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def upload(target: Tensor, *parts: tuple[np.ndarray, int, int]) -> None:
    """Write arrays one after the other in one copy, each filled up to its size.

    parts: (values [n] int64, size, filler)
    writes: target [sum of the sizes] int64
    """
    # Fresh memory each time: the copy runs later than this call, and torch hands pinned memory out
    # again only when its copy is over. A buffer of our own would be overwritten by the next step.
    host = torch.empty(target.shape, dtype=torch.int64, pin_memory=target.is_cuda)
    packed, start = host.numpy(), 0
    for values, size, filler in parts:
        packed[start : start + len(values)] = values
        packed[start + len(values) : start + size] = filler
        start += size
    target.copy_(host, non_blocking=True)
