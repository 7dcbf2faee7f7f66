"""`headstock.nn.sampler` in two kernels; three more if rows are truncated."""

from __future__ import annotations

from functools import partial

import torch
import triton
from attrs import evolve
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
    rows, vocab = logits.shape
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
    # Small parts for few rows: one row of 151,936 is 38 programs in parts of 4,096, 149 in parts of
    # 1,024.
    block = min(1024 if rows <= FEW_ROWS else 4096, triton.next_power_of_2(max(vocab, 16)))
    count = triton.cdiv(vocab, block)
    numbers = torch.empty(4, rows, count, dtype=torch.float32, device=logits.device)
    best, peaks, sums, ids = numbers[0], numbers[1], numbers[2], numbers[3].view(torch.int32)
    warm = sampling.temperature is not None
    edges = find_cut(logits, sampling, pdl=pdl, part=part) if warm else None
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
    # A separate kernel: the parts of a row are programs, which cannot wait for each other.
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
        ids if part is None else part.some,
        tokens,
        healthy,
        best if logprobs is None else logprobs,
        count,
        logits.stride(0),
        0 if part is None else len(part.some),
        WARM=warm,
        CUT=edges is not None,
        SUM=with_logprob,
        TARGETS=sampling.targets is not None,
        SOME=part is not None and part.is_some,
        OTHERS=part is not None and not part.is_some,
        BLOCK=triton.next_power_of_2(count),
        num_warps=4,
        **launch_options(pdl),
    )
    return tokens, healthy.view(torch.bool), logprobs


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
