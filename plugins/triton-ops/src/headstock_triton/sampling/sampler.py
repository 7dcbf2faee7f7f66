"""`headstock.nn.sampler` in two kernels; three more where rows are truncated."""

from __future__ import annotations

import math
from functools import partial

import torch
import triton
import triton.language as tl
from attrs import evolve
from torch import Tensor

from headstock.nn.penalties import apply_logit_rules_
from headstock.nn.sampler import attach_logprobs, sample_processed
from headstock.spi import Sample, Sampling
from headstock_triton.pdl import begin_next, launch_options, wait_for_previous
from headstock_triton.portable import max_or_nan
from headstock_triton.sampling.masks import FEW_ROWS, forbid
from headstock_triton.sampling.noise import (
    SLACK,
    guess_gumbel,
    gumbel_of,
    philox_word,
    philox_words,
)
from headstock_triton.sampling.processed import can_process, sample_with_processed
from headstock_triton.sampling.temperature import LOWEST_HEAT, apply_temperature
from headstock_triton.sampling.truncation import Cut, find_cut

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
)
"""Arrays that may begin anywhere, and are not compiled anew for each place."""


@triton.jit
def _load_part(row, mask, start, vocab, words, MASK: tl.constexpr, BLOCK: tl.constexpr):
    """Logits of the tokens start, start + 1, ... in float32; minus infinity where there is none."""
    at = start + tl.arange(0, BLOCK)
    x = tl.load(row + at, at < vocab, other=-INFINITY).to(tl.float32)
    return forbid(x, mask, start, vocab, words, BLOCK) if MASK else x


@triton.jit
def _cut_off(scores, start, edge, last, BLOCK: tl.constexpr):
    """Scores, with minus infinity for what a cut drops."""
    at = start + tl.arange(0, BLOCK)
    return tl.where((scores > edge) | ((scores == edge) & (at <= last)), scores, -INFINITY)


@triton.jit
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
    vocab,
    words,
    MASK: tl.constexpr,
    CUT: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """The best sum of score and noise of a part of a row, and its place."""
    value = tl.full((), -INFINITY, tl.float32)
    place = tl.zeros((), tl.int32)
    for done in range(0, BLOCK, STEP):
        x = _load_part(row, mask, start + done, vocab, words, MASK, STEP)
        scores = apply_temperature(x, origin, heat)
        if CUT:
            scores = _cut_off(scores, start + done, edge, last, STEP)
        scores += gumbel_of(philox_words(seed, position, start + done, STEP))
        best, at = tl.max(scores, 0, return_indices=True)
        place = tl.where(best > value, done + at, place)
        value = tl.maximum(value, best)
    return value, place


@triton.jit
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
    """Write what a part of a row has, as `part_kernel`."""
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
        guess += guess_gumbel(philox_words(seed, position, start, BLOCK))
        near = guess >= tl.max(guess, 0) - SLACK
        # How many there are, and the sum of their places, which is the place of a single one.
        found = tl.sum(tl.where(near, 65536 + tl.arange(0, BLOCK), 0), 0)
        place = found % 65536
        if found // 65536 == 1:
            token = (start + place).to(tl.int64)
            score = apply_temperature(tl.load(row + token).to(tl.float32), origin, heat)
            value = score + gumbel_of(philox_word(seed, position, token))
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
    tl.store(ids + out, tl.minimum(part * BLOCK + place, vocab - 1))
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

    Where there is NaN, infinity is the highest. Scores are less the part's highest logit, or the
    row's where it is cut. Guesses of sums of score and noise leave one token, whose sum alone is
    computed; only where two are nearly equal, or all are infinite, all sums are.
    """
    begin_next(PDL)
    wait_for_previous(PDL)
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if CUT and not SUM:
        if tl.load(picks + index) >= 0:
            return  # The row has its token already.
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


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def join_kernel(
    logits,
    temperature,
    targets,
    best,
    peaks,
    sums,
    ids,
    picks,
    tokens,
    healthy,
    logprobs,
    parts,
    stride,
    WARM: tl.constexpr,
    CUT: tl.constexpr,
    SUM: tl.constexpr,
    TARGETS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program a row: the best part's token, and its log-probability or the target's."""
    begin_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    if CUT:
        pick = tl.load(picks + row).to(tl.int64)
        # Only sound rows have a token by now. Without sums, nothing looked at their parts.
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
    _, place = tl.max(values, 0, return_indices=True)
    token = tl.load(ids + row * parts + tl.minimum(place, parts - 1)).to(tl.int64)
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


def _sample_tokens(
    logits: Tensor,
    sampling: Sampling,
    *,
    with_logprob: bool = False,
    pdl: bool,
    sharing: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A token a row, which rows are healthy, and the log-probabilities of the tokens or targets.

    As in torch: temperature 0 takes the best, the lowest id of equals; a row is healthy if its
        maximum is a number.
    logits: [n, vocab] of any float type
    returns: [n] int64, [n] bool, [n] float32 or None
    writes: logits where there is a mask and rows are truncated
    """
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    healthy = torch.empty(rows, dtype=torch.uint8, device=logits.device)
    logprobs = (
        torch.empty(rows, dtype=torch.float32, device=logits.device) if with_logprob else None
    )
    if not rows:
        return tokens, healthy.bool(), logprobs
    # Small parts for few rows: one row of 151,936 in parts of 4,096 is 38 programs, in parts of
    # 1,024 it is 149.
    block = min(1024 if rows <= FEW_ROWS else 4096, triton.next_power_of_2(max(vocab, 16)))
    count = triton.cdiv(vocab, block)
    numbers = torch.empty(4, rows, count, dtype=torch.float32, device=logits.device)
    best, peaks, sums, ids = numbers[0], numbers[1], numbers[2], numbers[3].view(torch.int32)
    warm = sampling.temperature is not None
    edges = find_cut(logits, sampling, pdl=pdl, sharing=sharing) if warm else None
    # Logits that were cut are masked by now.
    mask = None if sampling.mask is None or edges is not None else sampling.mask.contiguous()
    # A pointer that the kernel, as it is compiled, does not read stands in for each that is
    # missing.
    where = edges or Cut(peaks=best, edges=best, last_ids=ids, picks=ids)
    # Most rows that are cut have their tokens by now, and 10,000 programs take 10 us to do nothing.
    programs = count if edges is None or with_logprob else min(count, max(512 // rows, 1))
    part_kernel[(rows, programs)](
        logits,
        ids if mask is None else mask,
        *(
            best if column is None else column
            for column in (sampling.temperature, sampling.seeds, sampling.positions)
        ),
        where.peaks,
        where.edges,
        where.last_ids,
        where.picks,
        best,
        peaks,
        sums,
        ids,
        count,
        vocab,
        logits.stride(0),
        0 if mask is None else mask.shape[1],
        MASK=mask is not None,
        WARM=warm,
        CUT=edges is not None,
        SUM=with_logprob,
        BLOCK=block,
        STEP=min(block, 512),
        num_warps=4 if block < 4096 else 8,
        **launch_options(pdl),
    )
    # A kernel of its own: the parts of a row are programs, which cannot wait for each other.
    join_kernel[(rows,)](
        logits,
        *(
            best if column is None else column
            for column in (sampling.temperature, sampling.targets)
        ),
        best,
        peaks,
        sums,
        ids,
        where.picks,
        tokens,
        healthy,
        best if logprobs is None else logprobs,
        count,
        logits.stride(0),
        WARM=warm,
        CUT=edges is not None,
        SUM=with_logprob,
        TARGETS=sampling.targets is not None,
        BLOCK=triton.next_power_of_2(count),
        num_warps=4,
        **launch_options(pdl),
    )
    return tokens, healthy.view(torch.bool), logprobs


def fused_sample(
    logits: Tensor, sampling: Sampling, *, pdl: bool = False, sharing: bool = False
) -> Sample:
    """`headstock.nn.sampler.sample`; torch applies rules and finds alternatives, which are rare.

    logits: [n, vocab] of any float type
    sharing: whether room is left on the device for kernels of another stream
    writes: logits
    """
    processing = sampling.processing
    if processing is not None:
        if can_process(sampling):
            return sample_with_processed(logits, sampling, processing, fused_sample, pdl=pdl)
        return sample_processed(logits, sampling, processing, partial(fused_sample, pdl=pdl))
    rules = (
        sampling.banned,
        sampling.bias,
        sampling.repetition,
        sampling.presence,
        sampling.frequency,
    )
    # Log-probabilities are of the scores before any rule, which a mask overwrites.
    most = 0 if sampling.mask is None else -1
    if all(rule is None for rule in rules) and sampling.top_logprobs <= most:
        tokens, healthy, logprobs = _sample_tokens(
            logits,
            sampling,
            with_logprob=sampling.top_logprobs == 0,
            pdl=pdl,
            sharing=sharing,
        )
        if logprobs is None:
            return Sample(tokens=tokens, healthy=healthy)
        nothing = logprobs.new_empty(len(tokens), 0)
        return Sample(
            tokens=tokens,
            healthy=healthy,
            logprobs=logprobs,
            top_ids=nothing.long(),
            top_logprobs=nothing,
        )
    logits = logits.to(torch.float32)
    likely = logits.log_softmax(-1) if sampling.top_logprobs >= 0 else None
    apply_logit_rules_(logits, sampling)
    # Without targets, which only log-probabilities need. These are of the scores before the rules.
    applied = evolve(sampling, targets=None, mask=None)
    tokens, healthy, _ = _sample_tokens(logits, applied, pdl=pdl)
    return (
        Sample(tokens=tokens, healthy=healthy)
        if likely is None
        else attach_logprobs(tokens, healthy, likely, sampling)
    )
