"""The machine as plugins see it: plain data, so that a description of another one serves."""

from __future__ import annotations

import re
from collections.abc import Mapping

from attrs import field, frozen


def normalize_names(distributions: Mapping[str, str]) -> dict[str, str]:
    """The same with names normalized by PEP 503: "flash_attn_3" becomes "flash-attn-3"."""
    return {
        re.sub(r"[-_.]+", "-", name).lower(): version for name, version in distributions.items()
    }


@frozen(kw_only=True)
class DeviceEnv:
    """A device and the software around it.

    capability: CUDA's (major, minor); None elsewhere
    memory_bytes: the device's total
    distributions: normalized name of each installed distribution ("flash-attn-3") -> version
    """

    device: str
    capability: tuple[int, int] | None = None
    name: str = ""
    memory_bytes: int = 0
    torch: str = ""
    cuda: str | None = None
    distributions: Mapping[str, str] = field(factory=dict, converter=normalize_names)

    def __str__(self) -> str:
        if self.capability is None:
            return self.device
        return f"{self.device} sm_{self.capability[0]}{self.capability[1]}"


@frozen
class DeviceRange:
    """A kind of device, and for CUDA the compute capabilities served, both ends included."""

    device: str
    lowest: tuple[int, int] | None = None
    highest: tuple[int, int] | None = None

    def __contains__(self, env: DeviceEnv) -> bool:
        if env.device != self.device:
            return False
        # A device that says nothing of itself is not taken for one that is new enough.
        if env.capability is None:
            return self.lowest is None
        return (self.lowest is None or env.capability >= self.lowest) and (
            self.highest is None or env.capability <= self.highest
        )

    def __str__(self) -> str:
        match [f"sm_{c[0]}{c[1]}" if c else None for c in (self.lowest, self.highest)]:
            case [None, None]:
                return self.device
            case [None, high]:
                return f"{self.device} up to {high}"
            case [low, None]:
                return f"{self.device} from {low}"
            case [low, high]:
                return f"{self.device} {low}" if low == high else f"{self.device} {low} to {high}"
        raise AssertionError("a range has two ends")
