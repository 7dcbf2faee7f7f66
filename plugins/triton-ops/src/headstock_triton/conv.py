"""Short convolutions over states in pages: between two gates, or before silu."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headstock.nn.short_conv import ConvInputs
from headstock_triton.device_function import device_function
from headstock_triton.pdl import begin_next, launch_options, wait_for_previous
from headstock_triton.portable import round_to

BLOCK = 512
MANY_TOKENS = 256
"""From so many tokens on, a program has several of fewer channels: they share most inputs."""


@device_function
def load_input(x, token, width, at, mask, GATED: tl.constexpr):
    """The convolution's input at tokens.

    x: [tokens, width]; if GATED, [tokens, 3 * width]: the gate before, the one after and what is
        between, which the former is multiplied with
    """
    if GATED:
        line = x + token * 3 * width + at
        gate = tl.load(line, mask, other=0.0)
        inner = tl.load(line + 2 * width, mask, other=0.0)
        value = round_to(gate.to(tl.float32) * inner.to(tl.float32), gate.dtype)
    else:
        value = tl.load(x + token * width + at, mask, other=0.0)
    return value


@device_function
def store_result(
    total, bias, x, out, token, width, at, mask, GATED: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Write the second gate times the sum, or its silu; each step is rounded, as torch does."""
    dtype: tl.constexpr = x.dtype.element_ty
    if HAS_BIAS:
        total += tl.load(bias + at, mask, other=0.0).to(tl.float32)
    sums = round_to(total, dtype).to(tl.float32)
    if GATED:
        gate = tl.load(x + token * 3 * width + width + at, mask, other=0.0)
        result = sums * gate.to(tl.float32)
    else:
        result = sums / (1.0 + tl.exp(-sums))
    tl.store(out + token * width + at, round_to(result, dtype), mask)


@triton.jit
def step_kernel(
    x,
    weight,
    bias,
    state,
    pages,
    is_first,
    out,
    width,
    page_stride,
    tap_stride,
    TAPS: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows of one token: one program per row and block of channels, which advances its state."""
    begin_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    wait_for_previous(PDL)
    line = state + tl.load(pages + row) * page_stride + at
    # A page may hold NaN of another sequence, which a product with 0 would not remove.
    kept = mask & (tl.load(is_first + row) == 0)
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS - 1):
        value = tl.load(line + tap * tap_stride, kept, other=0.0)
        if tap > 0:
            tl.store(line + (tap - 1) * tap_stride, value, mask)
        total += value.to(tl.float32) * tl.load(weight + tap * width + at, mask, other=0.0).to(
            tl.float32
        )
    value = load_input(x, row, width, at, mask, GATED)
    tl.store(line + (TAPS - 2) * tap_stride, value, mask)
    last = tl.load(weight + (TAPS - 1) * width + at, mask, other=0.0)
    total += value.to(tl.float32) * last.to(tl.float32)
    store_result(total, bias, x, out, row, width, at, mask, GATED, HAS_BIAS)


@device_function
def load_source(
    source, x, state, pages, rows, width, page_stride, tap_stride, at, mask,
    TAPS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Load inputs by their numbers in `ConvInputs`: 0 for zeros, then the rows' states, then
    tokens."""
    index, size = source - 1, rows * (TAPS - 1)
    in_state = (index >= 0) & (index < size)
    page = tl.load(pages + index // (TAPS - 1), in_state, other=0)
    place = page * page_stride + (index % (TAPS - 1)) * tap_stride
    old = tl.load(state + place + at, mask & in_state, other=0.0)
    token = tl.maximum(index - size, 0)
    new = load_input(x, token, width, at, mask & (index >= size), GATED)
    return tl.where(in_state, old, new)


@triton.jit
def convolve_kernel(
    x,
    weight,
    bias,
    state,
    pages,
    sources,
    out,
    tokens,
    rows,
    width,
    page_stride,
    tap_stride,
    TAPS: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per `TOKENS` tokens and block of channels; states are only read."""
    begin_next(PDL)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    at = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    in_row, is_token = at < width, token < tokens
    mask = in_row & is_token
    wait_for_previous(PDL)
    # Far from where rows begin, inputs are the tokens before, and need not be looked up.
    first_input = 1 + rows * (TAPS - 1)
    oldest = tl.load(sources + token, is_token, other=0) - first_input
    # The last row's state lies before the first token, as earlier tokens would.
    is_other = is_token & ((oldest < 0) | (oldest != token - (TAPS - 1)))
    is_inside = tl.sum(tl.sum(is_other.to(tl.int32), 1), 0) == 0
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    if is_inside:
        for tap in tl.static_range(TAPS):
            value = load_input(x, token - (TAPS - 1 - tap), width, at, mask, GATED)
            row = tl.load(weight + tap * width + at, in_row, other=0.0)
            total += value.to(tl.float32) * row.to(tl.float32)
    else:
        for tap in tl.static_range(TAPS):
            source = tl.load(sources + tap * tokens + token, is_token, other=0)
            value = load_source(
                source, x, state, pages, rows, width, page_stride, tap_stride, at, mask, TAPS, GATED
            )
            row = tl.load(weight + tap * width + at, in_row, other=0.0)
            total += value.to(tl.float32) * row.to(tl.float32)
    store_result(total, bias, x, out, token, width, at, mask, GATED, HAS_BIAS)


@triton.jit
def keep_kernel(
    x,
    state,
    pages,
    targets,
    kept,
    rows,
    width,
    page_stride,
    tap_stride,
    TAPS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per target page and block of channels, which writes a state to it.

    A row may rewrite its own: each position of the state is computed from itself or later ones.
    """
    begin_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    wait_for_previous(PDL)
    line = state + tl.load(targets + row) * page_stride + at
    for tap in tl.static_range(TAPS - 1):
        source = tl.load(kept + row * (TAPS - 1) + tap)
        value = load_source(
            source, x, state, pages, rows, width, page_stride, tap_stride, at, mask, TAPS, GATED
        )
        tl.store(line + tap * tap_stride, value, mask)


def convolve_gated_(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    inputs: ConvInputs,
    *,
    pdl: bool = False,
) -> Tensor:
    """Same as `headstock.nn.short_conv.convolve_`, with the gates before and after it.

    projected: [tokens, 3 * width], the gate before, the one after and what is between
    weight: [taps, width]    bias: [width] or None    returns: [tokens, width]
    writes: state [pages, taps - 1, width], at the rows' pages and where states are saved
    """
    return _launch_(projected, weight, bias, state, inputs, gated=True, pdl=pdl)


def convolve_silu_(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    inputs: ConvInputs,
    *,
    pdl: bool = False,
) -> Tensor:
    """Same as `headstock.nn.short_conv.convolve_`, and then silu.

    x, result: [tokens, width]    weight: [taps, width]    bias: [width] or None
    writes: state [pages, taps - 1, width], at the rows' pages and where states are saved
    """
    return _launch_(x, weight, bias, state, inputs, gated=False, pdl=pdl)


def _launch_(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    inputs: ConvInputs,
    *,
    gated: bool,
    pdl: bool,
) -> Tensor:
    """One kernel where each row has one token, else two.   returns: [tokens, width]"""
    tokens, (taps, width) = len(x), weight.shape
    out = x.new_empty(tokens, width)
    if not tokens:
        return out
    assert state.stride(-1) == 1 and x.is_contiguous() and weight.is_contiguous()
    blocks, pages = triton.cdiv(width, BLOCK), inputs.pages
    strides = (state.stride(0), state.stride(1))
    # Without a bias, pass a pointer that is never read.
    term = weight if bias is None else bias
    fixed = {"TAPS": taps, "GATED": gated, "BLOCK": BLOCK, "num_warps": 4, **launch_options(pdl)}
    if inputs.sources is None or inputs.kept is None:
        step_kernel[(tokens, blocks)](
            x, weight, term, state, pages, inputs.is_first, out, width, *strides,
            HAS_BIAS=bias is not None, **fixed,
        )  # fmt: skip
        return out
    count, block = (16, 256) if tokens >= MANY_TOKENS else (1, BLOCK)
    convolve_kernel[(triton.cdiv(tokens, count), triton.cdiv(width, block))](
        x, weight, term, state, pages, inputs.sources, out, tokens, len(pages), width,
        *strides, HAS_BIAS=bias is not None, TOKENS=count, **fixed | {"BLOCK": block},
    )  # fmt: skip
    # Separate kernels: all tokens, and saved states, must have read the old ones first.
    if inputs.saved is not None and len(inputs.saved.pages):
        keep_kernel[(len(inputs.saved.pages), blocks)](
            x, state, pages, inputs.saved.pages, inputs.saved_inputs, len(pages), width,
            *strides, **fixed,
        )  # fmt: skip
    keep_kernel[(len(pages), blocks)](
        x, state, pages, pages, inputs.kept, len(pages), width, *strides, **fixed
    )
    return out
