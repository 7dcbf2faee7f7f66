"""`headstock.nn.sampler` in two kernels, or three where rows are truncated."""

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
from headstock_triton.noise import gumbel_noise
from headstock_triton.pdl import begin_next, launch_options, wait_for_previous
from headstock_triton.truncation import Cut, apply_temperature, find_cut

FEW_ROWS = 16
"""Up to here a row is shared out among more programs."""

INFINITY = tl.constexpr(math.inf)


UNALIGNED = (
    "temperature",
    "seeds",
    "positions",
    "targets",
    "cut_peaks",
    "edges",
    "last_ids",
    "peaks",
    "sums",
    "ids",
)
"""Arrays that may begin anywhere, and are not compiled anew for each place."""


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def part_kernel(
    logits,
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
    vocab,
    stride,
    WARM: tl.constexpr,
    CUT: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A part of a row: its best score and token, highest logit, and sum of exp(logit - highest).

    Where there is NaN, infinity is the highest. Scores are less the part's highest logit, or the
    row's where it is cut.
    """
    begin_next(PDL)
    wait_for_previous(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + at, at < vocab, other=-INFINITY).to(tl.float32)
    broken = tl.max((x != x).to(tl.int32), 0)
    peak = tl.where(broken > 0, INFINITY, tl.max(x, 0))
    level = tl.where((peak == INFINITY) | (peak == -INFINITY), 0.0, peak)
    scores = x - level
    if WARM:
        heat = tl.load(temperature + row)
        if CUT:
            scores = apply_temperature(x, tl.load(cut_peaks + row), heat)
            edge, last = tl.load(edges + row), tl.load(last_ids + row)
            scores = tl.where(
                (scores > edge) | ((scores == edge) & (at <= last)), scores, -INFINITY
            )
        else:
            scores = apply_temperature(x, level, heat)
        if heat > 0:
            scores += gumbel_noise(
                tl.load(seeds + row), tl.load(positions + row), part * BLOCK, BLOCK
            )
    value, place = tl.max(scores, 0, return_indices=True)
    out = row * tl.num_programs(1) + part
    tl.store(best + out, value)
    tl.store(ids + out, tl.minimum(part * BLOCK + place, vocab - 1))
    tl.store(peaks + out, peak)
    if SUM:
        tl.store(sums + out, tl.sum(tl.exp(x - level), 0))


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def join_kernel(
    logits,
    temperature,
    targets,
    best,
    peaks,
    sums,
    ids,
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
    at = tl.arange(0, BLOCK)
    mask, source = at < parts, row * parts + at
    values = tl.load(best + source, mask, other=-INFINITY)
    tops = tl.load(peaks + source, mask, other=-INFINITY)
    peak = tl.max(tops, 0)
    sound = (peak < INFINITY) & (peak > -INFINITY)
    level = tl.where(sound, peak, 0.0)
    if not CUT:
        if WARM:
            values += apply_temperature(tops, level, tl.load(temperature + row))
        else:
            values += tops - level
    _, place = tl.max(values, 0, return_indices=True)
    token = tl.load(ids + row * parts + tl.minimum(place, parts - 1)).to(tl.int64)
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


@triton.jit(do_not_specialize_on_alignment=("mask",))
def mask_kernel(
    logits,
    mask,
    vocab,
    stride,
    words,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Minus infinity for the tokens of a part of a row that its mask does not allow."""
    begin_next(PDL)
    wait_for_previous(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(mask + row * words + at // 32, at < vocab, other=-1)
    # Rows without a rule of their own have every bit set: nothing of their logits is touched.
    banned = ((word >> (at % 32)) & 1) == 0
    nothing = tl.full((BLOCK,), -INFINITY, tl.float32)
    tl.store(logits + row * stride + at, nothing, banned & (at < vocab))


def apply_mask_(logits: Tensor, mask: Tensor, *, pdl: bool = False) -> None:
    """Minus infinity for all tokens that a mask, as `Sampling.mask`, does not allow.

    logits: [n, vocab] of any float type
    writes: logits
    """
    rows, vocab = logits.shape
    mask = mask.contiguous()
    block = min(4096, triton.next_power_of_2(max(vocab, 16)))
    if rows:
        mask_kernel[(rows, triton.cdiv(vocab, block))](
            logits,
            mask,
            vocab,
            logits.stride(0),
            mask.shape[1],
            BLOCK=block,
            num_warps=8,
            **launch_options(pdl),
        )


def _sample_tokens(
    logits: Tensor, sampling: Sampling, with_logprob: bool, pdl: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A token a row, which rows are healthy, and the log-probabilities of the tokens or targets.

    As in torch: temperature 0 takes the best, the lowest id of equals; a row is healthy if its
        maximum is a number.
    logits: [n, vocab] of any float type
    returns: [n] int64, [n] bool, [n] float32 or None
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
    edges = find_cut(logits, sampling) if warm else None
    # A pointer that the kernel, as it is compiled, does not read stands in for each that is
    # missing.
    where = edges or Cut(peaks=best, edges=best, last_ids=ids)
    part_kernel[(rows, count)](
        logits,
        *(
            best if column is None else column
            for column in (sampling.temperature, sampling.seeds, sampling.positions)
        ),
        where.peaks,
        where.edges,
        where.last_ids,
        best,
        peaks,
        sums,
        ids,
        vocab,
        logits.stride(0),
        WARM=warm,
        CUT=edges is not None,
        SUM=with_logprob,
        BLOCK=block,
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


def fused_sample(logits: Tensor, sampling: Sampling, *, pdl: bool = False) -> Sample:
    """`headstock.nn.sampler.sample`; torch applies rules and finds alternatives, which are rare.

    logits: [n, vocab] of any float type
    writes: logits
    """
    if sampling.processing is not None:
        return sample_processed(
            logits, sampling, sampling.processing, partial(fused_sample, pdl=pdl)
        )
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
        if sampling.mask is not None:
            apply_mask_(logits, sampling.mask, pdl=pdl)
        tokens, healthy, logprobs = _sample_tokens(
            logits, sampling, sampling.top_logprobs == 0, pdl
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
    tokens, healthy, _ = _sample_tokens(logits, evolve(sampling, targets=None), False, pdl)
    return (
        Sample(tokens=tokens, healthy=healthy)
        if likely is None
        else attach_logprobs(tokens, healthy, likely, sampling)
    )
