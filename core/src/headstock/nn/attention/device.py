"""What attention backends ask about the device."""

from __future__ import annotations

import torch


def count_processors(device: torch.device) -> int:
    """The device's streaming multiprocessors; 1 where the device is no GPU."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
