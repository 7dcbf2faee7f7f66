"""Programmatic dependent launch (PDL): a kernel begins while the one before it still works.

A kernel lets the next one begin at once and, before it touches what earlier kernels write or read,
waits for them. What no kernel of the step writes (weights, tables) it loads before the wait, while
the device's memory would idle. A wait ends when all of the kernel before has ended, which waited
for its own; so every kernel of a chain waits, in each program.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton.language as tl

from headstock_triton.device_function import device_function
from headstock_triton.portable import INTERPRETED

LEAST_CAPABILITY = (9, 0)


@device_function
def begin_next(PDL: tl.constexpr):
    """Let the next kernel begin once all programs of this one came here or ended."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@device_function
def wait_for_previous(PDL: tl.constexpr):
    """Wait until all kernels before this one have ended.

    Never in a loop: Triton pipelines loops and moves later loads above the wait.
    """
    if PDL:
        # `gdc_wait` does not tell the compiler that memory changes here; the clobber does.
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;",
            "=r,~{memory}",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def launch_options(pdl: bool) -> dict[str, Any]:
    """What a launch of a kernel with the constant `PDL` is given."""
    # Triton's interpreter runs one kernel after the other and knows neither option nor instruction.
    return {"PDL": True, "launch_pdl": True} if pdl and not INTERPRETED else {"PDL": False}


@cache
def has_pdl(device: torch.device) -> bool:
    """Whether the device can begin a kernel while another one ends: GPUs from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY
