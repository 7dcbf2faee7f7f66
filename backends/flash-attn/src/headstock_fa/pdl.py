"""Programmatic dependent launch (PDL): a kernel starts while the previous one is still running."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def begin_next(PDL: tl.constexpr):
    """Let the next kernel begin once all programs of this one have reached this point or ended."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until all kernels before this one have ended. Never in a loop that Triton pipelines."""
    if PDL:
        # The clobber tells the compiler that memory changes here.
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;",
            "=r,~{memory}",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
