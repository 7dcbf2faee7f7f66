"""The kernels that sample from parts of rows, and combine the results of the parts."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from headstock_triton.device_function import device_function
from headstock_triton.pdl import begin_next, wait_for_previous
from headstock_triton.portable import max_or_nan
from headstock_triton.sampling.masks import forbid
from headstock_triton.sampling.noise import (
    SLACK,
    guess_gumbel,
    gumbel_of,
    philox_word,
    philox_words,
)
from headstock_triton.sampling.step_part import is_listed
from headstock_triton.sampling.temperature import LOWEST_HEAT, apply_temperature

INFINITY = tl.constexpr(math.inf)

UNALIGNED = (
    "mask",
    "temperature",
    "seeds",
    "positions",
    "targets",
    "cut_peaks",
    "edges",
    "last_ids",
    "picks",
    "peaks",
    "sums",
    "ids",
    "some",
)
"""Arrays of any alignment, without recompiling for each."""


@device_function
def _load_part(row, mask, start, vocab, words, MASK: tl.constexpr, BLOCK: tl.constexpr):
    """Logits of the tokens start, start + 1, ... in float32; minus infinity past the vocabulary."""
    at = start + tl.arange(0, BLOCK)
    x = tl.load(row + at, at < vocab, other=-INFINITY).to(tl.float32)
    return forbid(x, mask, start, vocab, words, BLOCK) if MASK else x


@device_function
def _cut_off(scores, start, edge, last, BLOCK: tl.constexpr):
    """Scores, with minus infinity for tokens that the cut drops."""
    at = start + tl.arange(0, BLOCK)
    return tl.where((scores > edge) | ((scores == edge) & (at <= last)), scores, -INFINITY)


@device_function
def _draw_exactly(
    row,
    mask,
    origin,
    heat,
    seed,
    position,
    edge,
    last,
    start,
    first,
    vocab,
    words,
    MASK: tl.constexpr,
    CUT: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """The best sum of score and noise in a part of a row, and its position."""
    value = tl.full((), -INFINITY, tl.float32)
    place = tl.zeros((), tl.int32)
    for done in range(0, BLOCK, STEP):
        x = _load_part(row, mask, start + done, vocab, words, MASK, STEP)
        scores = apply_temperature(x, origin, heat)
        if CUT:
            scores = _cut_off(scores, start + done, edge, last, STEP)
        scores += gumbel_of(philox_words(seed, position, first + start + done, STEP))
        best, at = tl.max(scores, 0, return_indices=True)
        place = tl.where(best > value, done + at, place)
        value = tl.maximum(value, best)
    return value, place


@device_function
def _sample_part(
    logits,
    mask,
    temperature,
    seeds,
    positions,
    cut_peaks,
    edges,
    last_ids,
    best,
    peaks,
    sums,
    ids,
    index,
    part,
    parts,
    first,
    vocab,
    stride,
    words,
    MASK: tl.constexpr,
    WARM: tl.constexpr,
    CUT: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Write the results of a part of a row, see `part_kernel`."""
    row, start = logits + index * stride, part * BLOCK
    x = _load_part(row, mask + index * words, start, vocab, words, MASK, BLOCK)
    peak = max_or_nan(x)
    peak = tl.where(peak != peak, INFINITY, peak)
    level = tl.where((peak == INFINITY) | (peak == -INFINITY), 0.0, peak)
    scores, origin, edge, last = x - level, level, -INFINITY, vocab
    heat = 0.0
    if WARM:
        heat = tl.load(temperature + index)
    if CUT:
        origin = tl.load(cut_peaks + index)
        edge, last = tl.load(edges + index), tl.load(last_ids + index)
        scores = _cut_off(apply_temperature(x, origin, heat), start, edge, last, BLOCK)
    if WARM and heat > 0:
        seed, position = tl.load(seeds + index), tl.load(positions + index)
        guess = scores if CUT else scores * (1.0 / tl.maximum(heat, LOWEST_HEAT))
        guess += guess_gumbel(philox_words(seed, position, first + start, BLOCK))
        near = guess >= tl.max(guess, 0) - SLACK
        # Their number, and the sum of their positions, which is the position if there is only one.
        found = tl.sum(tl.where(near, 65536 + tl.arange(0, BLOCK), 0), 0)
        place = found % 65536
        if found // 65536 == 1:
            token = (start + place).to(tl.int64)
            score = apply_temperature(tl.load(row + token).to(tl.float32), origin, heat)
            value = score + gumbel_of(philox_word(seed, position, first + token))
        else:
            value, place = _draw_exactly(
                row,
                mask + index * words,
                origin,
                heat,
                seed,
                position,
                edge,
                last,
                start,
                first,
                vocab,
                words,
                MASK,
                CUT,
                BLOCK,
                STEP,
            )
    else:
        value, place = tl.max(scores, 0, return_indices=True)
    out = index * parts + part
    tl.store(best + out, value)
    tl.store(ids + out, first + tl.minimum(part * BLOCK + place, vocab - 1))
    tl.store(peaks + out, peak)
    if SUM:
        tl.store(sums + out, tl.sum(tl.exp(x - level), 0))


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def part_kernel(
    logits,
    mask,
    temperature,
    seeds,
    positions,
    cut_peaks,
    edges,
    last_ids,
    picks,
    best,
    peaks,
    sums,
    ids,
    parts,
    first,
    vocab,
    stride,
    words,
    MASK: tl.constexpr,
    WARM: tl.constexpr,
    CUT: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Parts of a row: the best score and token of each, its highest logit, and its sum of
    exp(logit - highest).

    With NaN, the highest logit is infinity. Scores are relative to the part's highest logit, or to
    the row's if it is cut. Approximate sums of score and noise select one token, and only its exact
    sum is computed; all sums are computed if two are nearly equal or all are infinite. The row
    begins with the token `first`, a multiple of 4.
    """
    begin_next(PDL)
    wait_for_previous(PDL)
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if CUT and not SUM:
        if tl.load(picks + index) >= 0:
            return  # The row has its token already.
        # The call below is not in this loop: it would take 128 registers instead of 62.
        while part < parts:
            _sample_part(
                logits,
                mask,
                temperature,
                seeds,
                positions,
                cut_peaks,
                edges,
                last_ids,
                best,
                peaks,
                sums,
                ids,
                index,
                part,
                parts,
                first,
                vocab,
                stride,
                words,
                MASK,
                WARM,
                CUT,
                SUM,
                BLOCK,
                STEP,
            )
            part += tl.num_programs(1)
    else:
        _sample_part(
            logits,
            mask,
            temperature,
            seeds,
            positions,
            cut_peaks,
            edges,
            last_ids,
            best,
            peaks,
            sums,
            ids,
            index,
            part,
            parts,
            first,
            vocab,
            stride,
            words,
            MASK,
            WARM,
            CUT,
            SUM,
            BLOCK,
            STEP,
        )


@triton.jit(do_not_specialize=("num_some",), do_not_specialize_on_alignment=UNALIGNED)
def join_kernel(
    logits,
    temperature,
    targets,
    best,
    peaks,
    sums,
    ids,
    picks,
    some,
    tokens,
    healthy,
    logprobs,
    parts,
    stride,
    num_some,
    WARM: tl.constexpr,
    CUT: tl.constexpr,
    SUM: tl.constexpr,
    TARGETS: tl.constexpr,
    SOME: tl.constexpr,
    OTHERS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row: the best part's token, and its log-probability or the target's.

    SOME, OTHERS: whether the rows are those in `some`, and whether these are excluded
    """
    begin_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    if OTHERS and is_listed(row, some, num_some):
        return
    if SOME:
        place = tl.load(some + row)
        tokens += place - row
        healthy += place - row
    if CUT:
        pick = tl.load(picks + row).to(tl.int64)
        # Only valid rows have a token by now. Without sums, their parts were not read.
        if not SUM and pick >= 0:
            tl.store(tokens + row, pick)
            tl.store(healthy + row, 1)
            return
    at = tl.arange(0, BLOCK)
    mask, source = at < parts, row * parts + at
    values = tl.load(best + source, mask, other=-INFINITY)
    tops = tl.load(peaks + source, mask, other=-INFINITY)
    peak = tl.max(tops, 0)
    sound = (peak < INFINITY) & (peak > -INFINITY)
    level = tl.where(sound, peak, 0.0)
    if not CUT:
        if WARM:
            heat = tl.load(temperature + row)
            values += apply_temperature(tops, level, heat)
        else:
            values += tops - level
    _, which = tl.max(values, 0, return_indices=True)
    token = tl.load(ids + row * parts + tl.minimum(which, parts - 1)).to(tl.int64)
    if CUT:
        token = tl.where(pick >= 0, pick, token)
    tl.store(tokens + row, token)
    tl.store(healthy + row, sound.to(tl.uint8))
    if SUM:
        if TARGETS:
            target = tl.load(targets + row)
            token = tl.where(target < 0, token, target)
        total = tl.sum(tl.load(sums + source, mask, other=0.0) * tl.exp(tops - level), 0)
        tl.store(
            logprobs + row,
            tl.load(logits + row * stride + token).to(tl.float32) - level - tl.log(total),
        )
