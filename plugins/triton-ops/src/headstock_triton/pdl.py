"""Programmatic dependent launch (PDL): a kernel starts while the previous one is still running.

A kernel lets the next one start at once, and waits for earlier kernels before it touches data that
they read or write. It loads data that no kernel of the step writes (weights, tables) before the
wait, while the memory would otherwise idle. A wait ends when the previous kernel has ended, which
itself waited for its predecessor; so every kernel of a chain must wait, in each program.
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
    """Let the next kernel begin once all programs of this one have reached this point or ended."""
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
    """The launch options of a kernel with the constant `PDL`."""
    # Triton's interpreter runs kernels one after another and supports neither the option nor the
    # instruction.
    return {"PDL": True, "launch_pdl": True} if pdl and not INTERPRETED else {"PDL": False}


@cache
def has_pdl(device: torch.device) -> bool:
    """Whether the device can begin a kernel while another one ends: GPUs from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY
