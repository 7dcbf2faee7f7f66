"""Rows with logits processors: taken out of a step's logits, and sampled next to the others.

In a captured step they are sampled on a second stream while the first samples the others.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from attrs import evolve, frozen
from torch import Tensor

from headstock.nn.sampler import apply_processor, divide_by_temperature
from headstock.spi import Processing, Sample, Sampling
from headstock_triton.pdl import begin_next, launch_options, wait_for_previous
from headstock_triton.portable import max_or_nan
from headstock_triton.sampling.masks import forbid
from headstock_triton.sampling.step_part import MOST_ROWS, StepPart
from headstock_triton.sampling.streams import Beside
from headstock_triton.sampling.temperature import apply_temperature
from headstock_triton.sampling.truncation import has_limits

INFINITY = tl.constexpr(math.inf)


@frozen(kw_only=True, eq=False)
class TakenRows:
    """Some rows of a step's logits, without forbidden tokens.

    scores: [m, vocab] float32    sampling: their settings
    is_scaled: whether the original temperature is applied
    """

    scores: Tensor
    sampling: Sampling
    is_scaled: bool


@triton.jit(
    do_not_specialize_on_alignment=(
        "rows",
        "mask",
        "temperature",
        "top_p",
        "min_p",
        "top_k",
        "seeds",
        "positions",
        "floats",
        "integers",
        "masks",
    )
)
def take_kernel(
    logits,
    rows,
    mask,
    temperature,
    top_p,
    min_p,
    top_k,
    seeds,
    positions,
    scores,
    peaks,
    floats,
    integers,
    masks,
    vocab,
    stride,
    words,
    MASK: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    TOP_K: tl.constexpr,
    SEEDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A part of a row in float32 without forbidden tokens, and its highest score, which is NaN if
    there is any NaN; and the row's settings and mask.
    """
    begin_next(PDL)
    wait_for_previous(PDL)
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + index)
    x = tl.load(logits + row * stride + at, at < vocab, other=-INFINITY).to(tl.float32)
    if MASK:
        x = forbid(x, mask + row * words, part * BLOCK, vocab, words, BLOCK)
        num_words: tl.constexpr = (BLOCK + 31) // 32
        own = part * num_words + tl.arange(0, num_words)
        bits = tl.load(mask + row * words + own, own < words)
        tl.store(masks + index * words + own, bits, own < words)
    tl.store(scores + index * vocab + at, x, at < vocab)
    tl.store(peaks + index * tl.num_programs(1) + part, max_or_nan(x))
    if part == 0:
        # One launch copies what torch would copy with one launch per column.
        count = tl.num_programs(0)
        if TEMPERATURE:
            tl.store(floats + index, tl.load(temperature + row))
        if TOP_P:
            tl.store(floats + count + index, tl.load(top_p + row))
        if MIN_P:
            tl.store(floats + 2 * count + index, tl.load(min_p + row))
        if TOP_K:
            tl.store(integers + index, tl.load(top_k + row))
        if SEEDS:
            tl.store(integers + count + index, tl.load(seeds + row))
        tl.store(integers + 2 * count + index, tl.load(positions + row))


@triton.jit(do_not_specialize_on_alignment=("temperature", "heats"))
def scale_kernel(
    scores,
    peaks,
    temperature,
    heats,
    vocab,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A part of a taken row less the row's highest score, divided by the temperature; and the
    remaining temperature: 1, or still 0.
    """
    begin_next(PDL)
    wait_for_previous(PDL)
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.num_programs(1)
    each = tl.arange(0, PARTS)
    peak = max_or_nan(tl.load(peaks + index * parts + each, each < parts, other=-INFINITY))
    at = part * BLOCK + tl.arange(0, BLOCK)
    own = scores + index * vocab + at
    heat = tl.load(temperature + index)
    tl.store(own, apply_temperature(tl.load(own, at < vocab), peak, heat), at < vocab)
    if part == 0:
        tl.store(heats + index, tl.where(heat > 0, 1.0, 0.0))


def can_process(sampling: Sampling) -> bool:
    """Whether `sample_with_processed` serves these settings: those of replayed steps."""
    processing = sampling.processing
    rules = ("banned", "bias", "repetition", "presence", "frequency")
    return (
        processing is not None
        and processing.rows is not None
        and 0 < len(processing.rows) <= MOST_ROWS.value
        and sampling.top_logprobs < 0
        and all(getattr(sampling, name) is None for name in rules)
    )


class SamplePlain(Protocol):
    """Samples a part of a step, with settings without processing; it may write to the logits."""

    def __call__(self, logits: Tensor, sampling: Sampling, *, pdl: bool, part: StepPart) -> object:
        """Writes the part's tokens; kernels wait for each other if `pdl` lets them begin early."""


def sample_with_processed(
    logits: Tensor,
    sampling: Sampling,
    processing: Processing,
    sample_plain: SamplePlain,
    *,
    pdl: bool,
) -> Sample:
    """`headstock.nn.sampler.sample_processed`, if `can_process` holds.

    logits: [n, vocab] of any float type
    writes: logits
    raises: PluginBroken, as `apply_processor`
    """
    plain, rows = evolve(sampling, processing=None), processing.rows
    assert rows is not None
    beside = Beside.of(logits)
    whole = Sample(
        tokens=torch.empty(len(logits), dtype=torch.int64, device=logits.device),
        healthy=torch.empty(len(logits), dtype=torch.bool, device=logits.device),
    )
    some, others = (
        StepPart(
            tokens=whole.tokens,
            healthy=whole.healthy.view(torch.uint8),
            some=rows,
            is_some=is_some,
            beside=beside,
        )
        for is_some in (True, False)
    )
    # The longer work goes first: these rows, if rows are cut. Their logits may be read while all
    # rows are sampled, which at most writes minus infinity for forbidden tokens.
    taken = _take_rows(logits, plain, processing, pdl=pdl) if has_limits(plain) else None
    with beside:
        if taken is None:
            taken = _take_rows(logits, plain, processing, pdl=pdl and not beside.is_active)
        scores, settings = _process_rows(taken, processing)
        beside.mark()
        sample_plain(scores, settings, pdl=pdl, part=some)
    sample_plain(logits, plain, pdl=pdl, part=others)
    beside.wait()
    return whole


def _take_rows(
    logits: Tensor, sampling: Sampling, processing: Processing, *, pdl: bool
) -> TakenRows:
    """Take rows out of the logits, and their settings; divided by the temperature, if all
    processors come after that.
    """
    rows = processing.rows
    assert rows is not None and sampling.positions is not None
    count, vocab = len(rows), logits.shape[1]
    block, parts = _share_out(vocab)
    mask = None if sampling.mask is None else sampling.mask.contiguous()
    scores = torch.empty(count, vocab, dtype=torch.float32, device=logits.device)
    peaks = torch.empty(count, parts, dtype=torch.float32, device=logits.device)
    floats = torch.empty(3, count, dtype=torch.float32, device=logits.device)
    integers = torch.empty(3, count, dtype=torch.int64, device=logits.device)
    masks = None if mask is None else mask.new_empty(count, mask.shape[1])
    columns = {
        "temperature": floats[0],
        "top_p": floats[1],
        "min_p": floats[2],
        "top_k": integers[0],
        "seeds": integers[1],
    }
    given = {name: getattr(sampling, name) for name in columns}
    take_kernel[(count, parts)](
        logits,
        rows,
        rows if mask is None else mask,
        *(
            columns[name] if column is None else column.contiguous()
            for name, column in given.items()
        ),
        sampling.positions,
        scores,
        peaks,
        floats,
        integers,
        rows if masks is None else masks,
        vocab,
        logits.stride(0),
        0 if mask is None else mask.shape[1],
        MASK=mask is not None,
        **{name.upper(): column is not None for name, column in given.items()},
        BLOCK=block,
        num_warps=4,
        **launch_options(pdl),
    )
    settings: dict[str, Any] = {
        name: columns[name] for name, column in given.items() if column is not None
    }
    temperature = settings.get("temperature")
    is_scaled = temperature is not None and not any(
        processor.changes_argmax for processor, _ in processing.parts
    )
    if temperature is not None and is_scaled:
        settings["temperature"] = _scale_rows_(scores, peaks, temperature, pdl=pdl)
    return TakenRows(
        scores=scores,
        # With the mask again, since processors may raise scores of forbidden tokens; without
        # targets, which only log-probabilities need.
        sampling=evolve(sampling, mask=masks, targets=None, positions=integers[2], **settings),
        is_scaled=is_scaled,
    )


def _process_rows(taken: TakenRows, processing: Processing) -> tuple[Tensor, Sampling]:
    """Scores of rows after processors, and the settings still to be applied."""
    scores, temperature, at = taken.scores, taken.sampling.temperature, taken.sampling.positions
    assert at is not None
    first = [pair for pair in processing.parts if pair[0].changes_argmax]
    others = [pair for pair in processing.parts if not pair[0].changes_argmax]
    for processor, columns in first:
        scores = apply_processor(processor, scores, at, columns)
    if temperature is not None and others and not taken.is_scaled:
        scores = divide_by_temperature(scores, temperature)
        temperature = (temperature > 0).to(torch.float32)
    for processor, columns in others:
        scores = apply_processor(processor, scores, at, columns)
    return scores.contiguous(), evolve(taken.sampling, temperature=temperature)


def _scale_rows_(scores: Tensor, peaks: Tensor, temperature: Tensor, *, pdl: bool) -> Tensor:
    """Divide rows, less their peaks, by the temperature; return the remaining temperature.

    writes: scores
    """
    count, vocab = scores.shape
    block, parts = _share_out(vocab)
    heats = torch.empty_like(temperature)
    scale_kernel[(count, parts)](
        scores,
        peaks,
        temperature,
        heats,
        vocab,
        PARTS=triton.next_power_of_2(parts),
        BLOCK=block,
        num_warps=4,
        **launch_options(pdl),
    )
    return heats


def _share_out(vocab: int) -> tuple[int, int]:
    """Tokens per part, and parts per row: few rows in large parts would leave most of the device
    idle.
    """
    block = min(1024, triton.next_power_of_2(max(vocab, 16)))
    return block, triton.cdiv(vocab, block)
