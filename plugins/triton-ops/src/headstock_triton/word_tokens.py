"""The tokens of products in Gluon, which each warp loads, or a program normalizes for its warps."""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def begin_next(PDL: gl.constexpr):
    """As `pdl.begin_next`."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;",
            "=r",
            [],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def wait_for_previous(PDL: gl.constexpr):
    """As `pdl.wait_for_previous`."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;",
            "=r,~{memory}",
            [],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def load_tokens(values, unit, SLICES: gl.constexpr, SLICE: gl.constexpr):
    """Those of a unit, by slices."""
    found = ()
    for number in gl.static_range(SLICES):
        found = found + (gl.load(values + (unit * SLICES + number) * SLICE),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def stage_normed(
    x,
    norm,
    eps,
    LINES: gl.constexpr,
    WARPS: gl.constexpr,
    SLICE: gl.constexpr,
    PDL: gl.constexpr,
):
    """One token, normalized, in memory that the warps share: [lines, warps, slice], as bits.

    Every step is rounded as the torch operations round it.
    """
    block: gl.constexpr = triton.next_power_of_2(LINES)
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [8, 1, 4], [1, WARPS, 1], [2, 0, 1])
    of_lines: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    of_warps: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    of_columns: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, layout))
    line = gl.arange(0, block, of_lines)[:, None, None]
    warp = gl.arange(0, WARPS, of_warps)[None, :, None]
    column = gl.arange(0, SLICE, of_columns)[None, None, :]
    at = (warp * LINES + line) * SLICE + column
    inside = (line < LINES) & (warp >= 0) & (column >= 0)
    gain = gl.load(norm + at, inside, other=0.0).to(gl.float32)
    wait_for_previous(PDL)
    value = gl.load(x + at, inside, other=0.0).to(gl.float32)
    squares = gl.sum(gl.reshape(value * value, [block * WARPS * SLICE]), 0)
    scale = gl.rsqrt(squares / (LINES * WARPS * SLICE) + eps)
    normed = (value * scale * gain).to(x.dtype.element_ty).to(gl.int16, bitcast=True)
    # As many matrices of [warps, slice], each of which can be read alone.
    matrix: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    whole: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    staged = gl.allocate_shared_memory(gl.int16, [block, WARPS, SLICE], matrix)
    staged._reinterpret(gl.int16, [block, WARPS, SLICE], whole).store(normed)
    return staged


@gluon.jit
def read_staged(staged, line, none, right: gl.constexpr):
    """A slice of the token for each warp, in every seat.   none: 0, [warps, slice, tokens]"""
    bits = staged.index(line).load(gl.SliceLayout(2, right))
    return (gl.expand_dims(bits, 2) | none).to(gl.bfloat16, bitcast=True)
