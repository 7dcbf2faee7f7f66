"""Summaries of groups of 128 tokens of a row: the highest logit and, for top-p, the weight."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from headstock.spi import Sampling
from headstock_triton.device_function import device_function
from headstock_triton.pdl import begin_next, launch_options, wait_for_previous
from headstock_triton.sampling.masks import FEW_ROWS
from headstock_triton.sampling.step_part import StepPart, is_listed
from headstock_triton.sampling.temperature import LOWEST_HEAT

INFINITY = tl.constexpr(math.inf)
LOG2_E = tl.constexpr(math.log2(math.e))
GROUP = tl.constexpr(128)
FEW_GROUPS = tl.constexpr(8)
"""Number of groups per program with few rows."""
PIVOTS = tl.constexpr(16)
MASS_ERROR = tl.constexpr(1e-5)
"""Relative error of a group's weight: its sums and exp() are in float32."""


@frozen(kw_only=True, eq=False)
class Survey:
    """The summaries of the groups of rows.

    maxima: [n, groups] float32, the highest logit of each, infinity with NaN
    masses: [n, groups] float32, where top-p cuts a row that top-k does not, the sum of
        exp((logit - highest) / temperature) of each
    """

    maxima: Tensor
    masses: Tensor


@device_function
def _forbid(x, mask, source, at, vocab):
    """Scores, minus infinity for forbidden tokens, which is also written to the logits."""
    word = tl.load(mask + at // 32, at < vocab, other=-1)
    banned = ((word >> (at % 32)) & 1) == 0
    x = tl.where(banned, -INFINITY, x)
    tl.store(source, x, banned & (at < vocab))
    return x


@triton.jit(
    do_not_specialize=("num_some",),
    do_not_specialize_on_alignment=(
        "mask",
        "temperature",
        "top_k",
        "top_p",
        "some",
        "maxima",
        "masses",
    ),
)
def survey_kernel(
    logits,
    mask,
    temperature,
    top_k,
    top_p,
    some,
    maxima,
    masses,
    vocab,
    stride,
    groups,
    words,
    num_some,
    MASK: tl.constexpr,
    OTHERS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The highest logit of each group, infinity with NaN; and, if top-p but not top-k cuts a row,
    its sum of exp((logit - highest) / temperature). Forbidden tokens first become minus infinity in
    the logits, except in rows that are sampled separately.
    """
    begin_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    source = logits + row * stride + at
    x = tl.load(source, at < vocab, other=-INFINITY).to(tl.float32)
    if MASK:
        word = tl.program_id(1) * (GROUPS * GROUP // 32) + tl.arange(0, GROUPS * GROUP // 32)
        free = tl.load(mask + row * words + word, word < words, other=-1) == -1
        # Most rows have no rule, so every bit is set: check one word per 32 tokens.
        is_masked = tl.min(free.to(tl.int32), 0) == 0
        if OTHERS and is_masked:
            is_masked = not is_listed(row, some, num_some)
        if is_masked:
            if GROUPS <= FEW_GROUPS:
                x = _forbid(x, mask + row * words, source, at, vocab)
            else:
                # Written part by part and read again: faster than a mask over all logits.
                for start in range(0, GROUPS * GROUP, GROUP):
                    token = tl.program_id(1) * (GROUPS * GROUP) + start + tl.arange(0, GROUP)
                    nothing = tl.full((GROUP,), -INFINITY, tl.float32)
                    own = logits + row * stride + token
                    _forbid(nothing, mask + row * words, own, token, vocab)
                # Values written by other threads of the program are read from here on.
                tl.debug_barrier()
                x = tl.load(source, at < vocab, other=-INFINITY).to(tl.float32)
    broken = tl.max((x != x).to(tl.int32), 1)
    highest = tl.where(broken > 0, INFINITY, tl.max(x, 1))
    out, exists = row * groups + group, group < groups
    tl.store(maxima + out, highest, exists)
    if TOP_P:
        heat = tl.load(temperature + row)
        weighed = (heat > 0) & (tl.load(top_p + row) < 1)
        if TOP_K:
            weighed = weighed & (tl.load(top_k + row) >= vocab)
        if weighed:
            sound = (highest > -INFINITY) & (highest < INFINITY)
            below = tl.where(sound[:, None], x - highest[:, None], -INFINITY)
            by = LOG2_E / tl.maximum(heat, LOWEST_HEAT)
            tl.store(masses + out, tl.sum(tl.exp2(below * by), 1), exists)


@device_function
def order_keys(scores):
    """Integers that increase as scores, which are 0 or less, decrease."""
    return tl.abs(scores).to(tl.int32, bitcast=True)


@device_function
def find_bound(keys, weights, target):
    """A key such that the groups with it or a lower key weigh at least the target.

    It is near the lowest such key; if all groups weigh less, it is above all keys.
    """
    steps = tl.arange(0, PIVOTS)
    bound = tl.zeros((), tl.int32)
    # Four bits per pass. Lower bits would only save reading a few groups.
    for digit in range(4):
        shift = 27 - 4 * digit
        pivots = bound + (steps << shift) + ((1 << shift) - 1)
        sums = tl.sum(tl.where(keys[None, :] <= pivots[:, None], weights[None, :], 0.0), 1)
        short = tl.sum((sums < target).to(tl.int32), 0)
        bound += tl.minimum(short, PIVOTS - 1) << shift
    return bound + ((1 << 15) - 1)


def survey_groups_(
    logits: Tensor, sampling: Sampling, *, pdl: bool, part: StepPart | None = None
) -> Survey:
    """The summaries of the groups of rows, without forbidden tokens.

    logits: [n, vocab] of any float type
    part: the part of a step's rows; results of other rows may be wrong
    writes: logits, minus infinity for forbidden tokens
    """
    rows, vocab = logits.shape
    groups = triton.cdiv(vocab, GROUP.value)
    found = torch.empty(2, rows, groups, dtype=torch.float32, device=logits.device)
    maxima, masses = found[0], found[1]
    # Each missing pointer is replaced by one that this variant of the kernel does not read.
    columns = (sampling.temperature, sampling.top_k, sampling.top_p)
    mask = None if sampling.mask is None else sampling.mask.contiguous()
    own = FEW_GROUPS.value if rows <= FEW_ROWS else 32
    own = min(own, triton.next_power_of_2(groups))
    survey_kernel[(rows, triton.cdiv(groups, own))](
        logits,
        maxima if mask is None else mask,
        *(maxima if column is None else column for column in columns),
        maxima if part is None else part.some,
        maxima,
        masses,
        vocab,
        logits.stride(0),
        groups,
        0 if mask is None else mask.shape[1],
        0 if part is None else len(part.some),
        MASK=mask is not None,
        OTHERS=part is not None and not part.is_some,
        TOP_K=sampling.top_k is not None,
        TOP_P=sampling.top_p is not None,
        GROUPS=own,
        # With another stream running, more threads per program are faster.
        num_warps=8 if part is not None and not part.is_some else 4,
        **launch_options(pdl),
    )
    return Survey(maxima=maxima, masses=masses)
