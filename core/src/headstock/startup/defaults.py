"""What `auto` means: lists that core owns, one for each setting.

Installing a package changes nothing until it is named, because no plugin can enter a list.
"""

from __future__ import annotations

from headstock.spi import DeviceRange

ATTENTION: tuple[tuple[DeviceRange, tuple[str, ...]], ...] = (
    (DeviceRange("cpu"), ("sdpa",)),
    (DeviceRange("cuda", (10, 0), (10, 3)), ("trtllm", "fi", "fa,fi", "fa", "sdpa")),
    (DeviceRange("cuda", (9, 0), (9, 0)), ("fa,fi", "fa", "fi", "sdpa")),
    (DeviceRange("cuda", (8, 0), (8, 9)), ("fa,fi", "fi", "fa", "sdpa")),
    (DeviceRange("cuda", (11, 0)), ("fi", "fa", "sdpa")),
    (DeviceRange("cuda"), ("sdpa",)),
)
"""Device -> what `--attn auto` tries, best first; the first range that has the device counts."""

RUNNERS = ("cudagraph", "eager")
"""What `--runner auto` tries, best first."""

OPS = ("triton", "fbgemm", "onednn", "torch")
"""What `--ops auto` tries, best first."""

PAGE_SIZES = {"cuda": 64, "cpu": 16}
"""What `--page-size auto` tries first, by kind of device."""

OTHER_PAGE_SIZES = (64, 32, 16, 128, 256, 8, 4, 2, 1)
"""What `--page-size auto` tries after that, when a plugin does not serve the first size."""
