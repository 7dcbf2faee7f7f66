"""`headstock.nn.sampler` in two kernels; three more if rows are truncated."""

from __future__ import annotations

from functools import partial

import torch
import triton
from attrs import evolve, frozen
from torch import Tensor

from headstock.nn.penalties import apply_logit_rules_
from headstock.nn.sampler import attach_logprobs, find_targets, rank_tokens, sample_processed
from headstock.spi import Sample, Sampling
from headstock_triton.pdl import launch_options
from headstock_triton.sampling.masks import FEW_ROWS
from headstock_triton.sampling.parts import join_kernel, part_kernel
from headstock_triton.sampling.processed import can_process, sample_with_processed
from headstock_triton.sampling.step_part import StepPart
from headstock_triton.sampling.truncation import Cut, find_cut


def _sample_tokens(
    logits: Tensor,
    sampling: Sampling,
    *,
    with_logprob: bool = False,
    pdl: bool,
    part: StepPart | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A token per row, which rows are healthy, and the log-probabilities of the tokens or targets.

    As in torch: temperature 0 selects the best token, the lowest id among equals; a row is healthy
        if its maximum is a number.
    logits: [n, vocab] of any float type
    returns: [n] int64, [n] bool, [n] float32 or None
    writes: logits, if there is a mask and rows are truncated
    """
    rows = len(logits)
    if part is None:
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
        healthy = torch.empty(rows, dtype=torch.uint8, device=logits.device)
    else:
        tokens, healthy = part.tokens, part.healthy
    logprobs = (
        torch.empty(rows, dtype=torch.float32, device=logits.device) if with_logprob else None
    )
    if not rows:
        return tokens, healthy.bool(), logprobs
    warm = sampling.temperature is not None
    edges = find_cut(logits, sampling, pdl=pdl, part=part) if warm else None
    numbers = sample_parts(logits, sampling, edges, with_logprob=with_logprob, pdl=pdl)
    join_parts(
        logits, sampling, numbers, edges, Joined(tokens, healthy, logprobs), part=part, pdl=pdl
    )
    return tokens, healthy.view(torch.bool), logprobs


@frozen(eq=False)
class Joined:
    """What is written of each row: [rows] int64, [rows] uint8, [rows] float32 or None."""

    tokens: Tensor
    healthy: Tensor
    logprobs: Tensor | None = None


def sample_parts(
    logits: Tensor,
    sampling: Sampling,
    edges: Cut | None = None,
    *,
    own: range | None = None,
    with_logprob: bool = False,
    pdl: bool,
) -> Tensor:
    """The best score, the highest logit, the best token as bits, and the sum, of parts of rows.

    own: the token ids of the logits, which may be padded; None for whole rows
    returns: [4, rows, parts] float32; the sums are undefined unless `with_logprob`
    """
    rows, width = logits.shape
    first, vocab = (0, width) if own is None else (own.start, len(own))
    # Small parts for few rows: one row of 151,936 is 38 programs in parts of 4,096, 149 in parts of
    # 1,024.
    block = min(1024 if rows <= FEW_ROWS else 4096, triton.next_power_of_2(max(width, 16)))
    count = triton.cdiv(width, block)
    numbers = torch.empty(4, rows, count, dtype=torch.float32, device=logits.device)
    best, peaks, sums = numbers[0], numbers[1], numbers[3]
    ids = numbers[2].view(torch.int32)
    # Logits that were cut are masked by now.
    mask = None if sampling.mask is None or edges is not None else sampling.mask.contiguous()
    # Each missing pointer is replaced by one that this variant of the kernel does not read.
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
        first,
        vocab,
        logits.stride(0),
        0 if mask is None else mask.shape[1],
        MASK=mask is not None,
        WARM=sampling.temperature is not None,
        CUT=edges is not None,
        SUM=with_logprob,
        BLOCK=block,
        STEP=min(block, 512),
        num_warps=4 if block < 4096 else 8,
        **launch_options(pdl),
    )
    return numbers


def join_parts(
    logits: Tensor,
    sampling: Sampling,
    numbers: Tensor,
    edges: Cut | None,
    joined: Joined,
    *,
    part: StepPart | None = None,
    pdl: bool,
) -> None:
    """Join what `sample_parts` found, in the order of the vocabulary.

    numbers: [4, rows, parts], or [3, rows, parts] where no log-probability is asked for
    writes: joined
    """
    count = numbers.shape[2]
    best, peaks, ids = numbers[0], numbers[1], numbers[2].view(torch.int32)
    where = edges or Cut(peaks=best, edges=best, last_ids=ids, picks=ids)
    # A separate kernel: the parts of a row are programs, which cannot wait for each other.
    join_kernel[(numbers.shape[1],)](
        logits,
        *(
            best if column is None else column
            for column in (sampling.temperature, sampling.targets)
        ),
        best,
        peaks,
        numbers[-1],
        ids,
        where.picks,
        ids if part is None else part.some,
        joined.tokens,
        joined.healthy,
        best if joined.logprobs is None else joined.logprobs,
        count,
        logits.stride(0),
        0 if part is None else len(part.some),
        WARM=sampling.temperature is not None,
        CUT=edges is not None,
        SUM=joined.logprobs is not None,
        TARGETS=sampling.targets is not None,
        SOME=part is not None and part.is_some,
        OTHERS=part is not None and not part.is_some,
        BLOCK=triton.next_power_of_2(count),
        num_warps=4,
        **launch_options(pdl),
    )


def has_rules(sampling: Sampling) -> bool:
    """Whether torch applies rules to the logits before the kernels see them."""
    names = ("banned", "bias", "repetition", "presence", "frequency")
    return any(getattr(sampling, name) is not None for name in names)


def fused_sample(
    logits: Tensor, sampling: Sampling, *, pdl: bool = False, part: StepPart | None = None
) -> Sample:
    """`headstock.nn.sampler.sample`; torch applies rules and computes alternatives, which are rare.

    logits: [n, vocab] of any float type
    part: the part of a step's rows, if not all
    writes: logits, and the tokens of the part
    """
    processing = sampling.processing
    if processing is not None:
        if can_process(sampling):
            return sample_with_processed(logits, sampling, processing, fused_sample, pdl=pdl)
        return sample_processed(logits, sampling, processing, partial(fused_sample, pdl=pdl))
    # Log-probabilities are of the scores before any rule, which a mask overwrites.
    most = 0 if sampling.mask is None else -1
    if not has_rules(sampling) and sampling.top_logprobs <= most:
        tokens, healthy, logprobs = _sample_tokens(
            logits,
            sampling,
            with_logprob=sampling.top_logprobs == 0,
            pdl=pdl,
            part=part,
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
            # From the original logits: without a mask nothing is written to them.
            ranks=rank_tokens(logits, find_targets(tokens, sampling)),
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
