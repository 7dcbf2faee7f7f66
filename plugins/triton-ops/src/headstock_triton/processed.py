"""Rows that logits processors change: taken out of a step's logits, and sampled with the others.

A step of 256 rows in which 8 are processed launches two kernels more than one without processors,
and what the processors themselves launch. The rows' scores stay apart in float32; the kernels that
sample read a processed row there, and any other row among the logits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from attrs import evolve, frozen
from torch import Tensor

from headstock.nn.sampler import apply_processor, divide_by_temperature
from headstock.spi import Processing, Sampling
from headstock_triton.masks import apply_mask_, forbid
from headstock_triton.pdl import begin_next, launch_options, wait_for_previous
from headstock_triton.temperature import apply_temperature

INFINITY = tl.constexpr(math.inf)
MOST_ROWS = 8
"""Rows up to which each program looks for its own among them."""


@frozen(kw_only=True, eq=False)
class ProcessedRows:
    """Some rows of a step's logits as they are to be sampled.

    rows: [m] int64, which rows, some of them perhaps several times with the same scores
    scores: [m, vocab] float32, dense
    is_scaled: whether they are divided by the temperature; 1 takes its place where it is above 0
    """

    rows: Tensor
    scores: Tensor
    is_scaled: bool


@triton.jit
def find_entry(rows, row, count, FEW: tl.constexpr):
    """The entry of a row among the processed ones; -1 for another row, and where FEW is 0."""
    entry = tl.full((), -1, tl.int32)
    if FEW:
        each = tl.arange(0, FEW)
        found = tl.load(rows + each, each < count, other=-1) == row
        entry = tl.max(tl.where(found, each, -1), 0)
    return entry


@triton.jit
def load_scores(logits, scores, entry, at, vocab, FEW: tl.constexpr):
    """The scores of a row's tokens in float32; minus infinity past the vocabulary.

    logits: where the row begins    scores: those of all processed rows    entry: as `find_entry`
    """
    if FEW:
        x = tl.load(logits + at, (at < vocab) & (entry < 0), other=-INFINITY).to(tl.float32)
        own = scores + tl.maximum(entry, 0).to(tl.int64) * vocab
        processed = tl.load(own + at, (at < vocab) & (entry >= 0), other=-INFINITY)
        x = tl.where(entry < 0, x, processed)
    else:
        x = tl.load(logits + at, at < vocab, other=-INFINITY).to(tl.float32)
    return x


@triton.jit
def load_heat(temperature, row, entry, SCALED: tl.constexpr):
    """The temperature that a row is still to be divided by."""
    heat = tl.load(temperature + row)
    if SCALED:
        heat = tl.where((entry >= 0) & (heat > 0), 1.0, heat)
    return heat


@triton.jit(do_not_specialize_on_alignment=("rows", "mask", "positions", "at_positions"))
def take_kernel(
    logits,
    rows,
    mask,
    positions,
    scores,
    peaks,
    at_positions,
    vocab,
    stride,
    words,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A part of a row in float32 without what its mask forbids, and its highest score, which is NaN
    where there is any; and the row's position.
    """
    begin_next(PDL)
    wait_for_previous(PDL)
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + index)
    x = tl.load(logits + row * stride + at, at < vocab, other=-INFINITY).to(tl.float32)
    if MASK:
        x = forbid(x, mask + row * words, part * BLOCK, vocab, words, BLOCK)
    tl.store(scores + index * vocab + at, x, at < vocab)
    broken = tl.max((x != x).to(tl.int32), 0)
    peak = tl.where(broken > 0, float("nan"), tl.max(tl.where(x != x, -INFINITY, x), 0))
    tl.store(peaks + index * tl.num_programs(1) + part, peak)
    if part == 0:
        tl.store(at_positions + index, tl.load(positions + row))


@triton.jit(do_not_specialize_on_alignment=("rows", "temperature"))
def scale_kernel(
    scores,
    peaks,
    rows,
    temperature,
    vocab,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A part of a taken row less the row's highest score, by the temperature."""
    begin_next(PDL)
    wait_for_previous(PDL)
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.num_programs(1)
    each = tl.arange(0, PARTS)
    tops = tl.load(peaks + index * parts + each, each < parts, other=-INFINITY)
    broken = tl.max((tops != tops).to(tl.int32), 0)
    peak = tl.where(broken > 0, float("nan"), tl.max(tl.where(tops != tops, -INFINITY, tops), 0))
    at = part * BLOCK + tl.arange(0, BLOCK)
    own = scores + index * vocab + at
    heat = tl.load(temperature + tl.load(rows + index))
    tl.store(own, apply_temperature(tl.load(own, at < vocab), peak, heat), at < vocab)


def read_processed(processed: ProcessedRows | None, absent: Tensor) -> tuple[Tensor, Tensor]:
    """The rows and the scores that kernels read; `absent` twice where no row is processed."""
    return (absent, absent) if processed is None else (processed.rows, processed.scores)


def processed_constants(processed: ProcessedRows | None) -> dict[str, Any]:
    """The constants `FEW` and `SCALED` of kernels that read processed rows."""
    is_scaled = processed is not None and processed.is_scaled
    return {"FEW": 0 if processed is None else MOST_ROWS, "SCALED": is_scaled}


def can_process(sampling: Sampling) -> bool:
    """Whether `process_rows` serves these settings: those of replayed steps."""
    processing = sampling.processing
    rules = ("banned", "bias", "repetition", "presence", "frequency")
    return (
        processing is not None
        and processing.rows is not None
        and 0 < len(processing.rows) <= MOST_ROWS
        and sampling.top_logprobs < 0
        and all(getattr(sampling, name) is None for name in rules)
    )


def process_rows(
    logits: Tensor, sampling: Sampling, processing: Processing, *, pdl: bool
) -> ProcessedRows:
    """Take rows out of the logits, and have processors change them.

    A mask is applied before the processors alone: they may move scores to tokens that it forbids.

    logits: [n, vocab] of any float type
    raises: PluginBroken, as `apply_processor`
    """
    rows, positions, temperature = processing.rows, sampling.positions, sampling.temperature
    assert rows is not None and positions is not None
    count, vocab = len(rows), logits.shape[1]
    # Parts are small: few rows would else leave most of the device idle.
    block = min(1024, triton.next_power_of_2(max(vocab, 16)))
    parts = triton.cdiv(vocab, block)
    scores = torch.empty(count, vocab, dtype=torch.float32, device=logits.device)
    peaks = torch.empty(count, parts, dtype=torch.float32, device=logits.device)
    at = torch.empty(count, dtype=torch.int64, device=logits.device)
    mask = None if sampling.mask is None else sampling.mask.contiguous()
    options = {"BLOCK": block, "num_warps": 4, **launch_options(pdl)}
    take_kernel[(count, parts)](
        logits,
        rows,
        rows if mask is None else mask,
        positions,
        scores,
        peaks,
        at,
        vocab,
        logits.stride(0),
        0 if mask is None else mask.shape[1],
        MASK=mask is not None,
        **options,
    )
    first = [pair for pair in processing.parts if pair[0].changes_argmax]
    others = [pair for pair in processing.parts if not pair[0].changes_argmax]
    for processor, columns in first:
        scores = apply_processor(processor, scores, at, columns)
    if temperature is None or not others:
        return ProcessedRows(rows=rows, scores=scores.contiguous(), is_scaled=False)
    if first:
        scores = divide_by_temperature(scores, temperature[rows])
    else:
        scale_kernel[(count, parts)](
            scores,
            peaks,
            rows,
            temperature,
            vocab,
            PARTS=triton.next_power_of_2(parts),
            **options,
        )
    for processor, columns in others:
        scores = apply_processor(processor, scores, at, columns)
    return ProcessedRows(rows=rows, scores=scores.contiguous(), is_scaled=True)


def mask_processed(processed: ProcessedRows, mask: Tensor, *, pdl: bool) -> ProcessedRows:
    """The processed rows without the tokens that a mask of the step does not allow."""
    scores = processed.scores
    apply_mask_(scores, mask[processed.rows], pdl=pdl)
    return evolve(processed, scores=scores)
