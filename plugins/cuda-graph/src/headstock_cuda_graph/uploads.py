"""From host arrays to the static inputs of graphs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def upload(inputs: Tensor, lines: tuple[np.ndarray, ...], *, padding: tuple[int, ...]) -> None:
    """Write arrays of equal length to the lines of `inputs`, and each line's padding after them.

    lines: one for each of inputs, [n] int64
    writes: inputs [lines, at least n] int64
    """
    # Fresh memory each time: torch hands pinned memory out again only when its copy is over.
    host = torch.empty(inputs.shape, dtype=torch.int64, pin_memory=inputs.is_cuda)
    packed = host.numpy()
    for line, values, filler in zip(packed, lines, padding, strict=True):
        line[: len(values)], line[len(values) :] = values, filler
    inputs.copy_(host, non_blocking=True)
