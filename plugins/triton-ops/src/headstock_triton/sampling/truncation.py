"""The edges of top-k, top-p and min-p in each row, as in `headstock.nn.truncation`, without a sort.

Most rows keep few tokens, which `candidates.py` handles. The search is for the others.

A token is kept if the better tokens weigh too little: they are fewer than top_k, or have less
probability than top_p among those that top_k keeps. That weight only grows as scores fall, so a
bracket is narrowed down to the lowest score that is kept: each pass over the row weighs the tokens
above several pivots. Of tokens at that score, as many as fit are kept, lower ids first.
Probabilities are summed in float64, as torch's are.
"""

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
from headstock_triton.sampling.candidates import LEAST_MASS, UNDECIDED, WHOLE, choose_tokens_
from headstock_triton.sampling.step_part import StepPart
from headstock_triton.sampling.survey import survey_groups_
from headstock_triton.sampling.temperature import apply_temperature

INFINITY = tl.constexpr(math.inf)
PIVOTS = tl.constexpr(8)


@frozen(kw_only=True, eq=False)
class Cut:
    """The part of each row that is kept: scores above the edge, and those at the edge up to the
    last id.

    peaks: [rows] float32, the highest logit    edges: [rows] float32    last_ids: [rows] int32
    picks: [rows] int32, the token if it was sampled with the cut, else `WHOLE`
    """

    peaks: Tensor
    edges: Tensor
    last_ids: Tensor
    picks: Tensor


@device_function
def _load(row, at, VOCAB: tl.constexpr):
    """Logits of the tokens `at` in float32; minus infinity past the vocabulary."""
    return tl.load(row + at, at < VOCAB, other=-INFINITY).to(tl.float32)


@device_function
def _scores_at(row, at, peak, heat, VOCAB: tl.constexpr):
    """Scores of the tokens `at`; minus infinity past the vocabulary."""
    return apply_temperature(_load(row, at, VOCAB), peak, heat)


@device_function
def _ends_of(row, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest finite logit and the highest logit, which is infinity with NaN."""
    least = tl.full((BLOCK,), INFINITY, tl.float32)
    peak = tl.full((BLOCK,), -INFINITY, tl.float32)
    for start in range(0, VOCAB, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = _load(row, at, VOCAB)
        least = tl.minimum(least, tl.where(x > -INFINITY, x, INFINITY))
        peak = tl.maximum(peak, tl.where(x != x, INFINITY, x))
    return tl.min(least, 0), tl.max(peak, 0)


@device_function
def _lowest_of(
    row,
    peak,
    heat,
    floor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The lowest finite score from the floor up."""
    lowest = tl.full((BLOCK,), INFINITY, tl.float32)
    for start in range(0, VOCAB, BLOCK):
        at = start + tl.arange(0, BLOCK)
        s = _scores_at(row, at, peak, heat, VOCAB)
        lowest = tl.minimum(lowest, tl.where((s >= floor) & (s > -INFINITY), s, INFINITY))
    return tl.min(lowest, 0)


@device_function
def _mass_of(
    row,
    peak,
    heat,
    floor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of exp(score) from the floor up."""
    mass = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, VOCAB, BLOCK):
        at = start + tl.arange(0, BLOCK)
        s = _scores_at(row, at, peak, heat, VOCAB)
        inside = s >= floor
        if tl.max(inside.to(tl.int32), 0) > 0:
            mass += tl.where(inside, tl.exp(s.to(tl.float64)), 0.0)
    return tl.sum(mass, 0)


@device_function
def _search_edge(
    row,
    peak,
    heat,
    lowest,
    target,
    VOCAB: tl.constexpr,
    WEIGH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The lowest score, from `lowest` up, such that better scores weigh less than the target.

    A token weighs 1, or exp(score).

    `lowest` must be one of the row's scores. The bracket is: low < edge <= high. Scores above
    `high` weigh less than the target, and those above `low` do not. `least` and `most` are the
    scores at its ends.
    returns: the edge, the weight above it, how many tokens are at it
    """
    dtype: tl.constexpr = tl.float64 if WEIGH else tl.int32
    steps = tl.arange(0, PIVOTS)
    low = tl.full((), -INFINITY, tl.float32)
    high, least, most = tl.zeros((), tl.float32), lowest, tl.zeros((), tl.float32)
    above, count = tl.zeros((), dtype), tl.zeros((), tl.int32)
    searching = high == 0
    while searching:
        bottom, top = tl.maximum(low, least), tl.minimum(high, most)
        pivots = bottom + (top - bottom) * (steps.to(tl.float32) / PIVOTS)
        weights = tl.zeros((PIVOTS, BLOCK), dtype)
        counts = tl.zeros((BLOCK,), tl.int32)
        smallest = tl.full((BLOCK,), INFINITY, tl.float32)
        largest = tl.full((BLOCK,), -INFINITY, tl.float32)
        for start in range(0, VOCAB, BLOCK):
            at = start + tl.arange(0, BLOCK)
            s = _scores_at(row, at, peak, heat, VOCAB)
            inside = (s > low) & (s >= lowest) & (s <= top)
            # after top_k most blocks hold nothing of interest
            if tl.max(inside.to(tl.int32), 0) > 0:
                smallest = tl.minimum(smallest, tl.where(inside, s, INFINITY))
                largest = tl.maximum(largest, tl.where(inside, s, -INFINITY))
                counts += inside.to(tl.int32)
                weight = inside.to(tl.int32)
                if WEIGH:
                    weight = tl.where(inside, tl.exp(s.to(tl.float64)), 0.0)
                weights += tl.where(s[None, :] > pivots[:, None], weight[None, :], 0)
        better = above + tl.sum(weights, 1)
        least, most, count = tl.min(smallest, 0), tl.max(largest, 0), tl.sum(counts, 0)
        searching = least < most
        if searching:
            stays = (better < target) & (pivots > low)
            low = tl.maximum(low, tl.max(tl.where(stays, -INFINITY, pivots), 0))
            high = tl.min(tl.where(stays, pivots, top), 0)
            above = tl.max(tl.where(stays, better, above), 0)
    # The bracket is empty if sums in another order fell on the other side of the target: everything
    # above it is kept.
    return tl.where(least <= most, least, high), above, count


@device_function
def _nth_at(
    row,
    peak,
    heat,
    edge,
    n,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The id of the n-th token, from 1, whose score is the edge."""
    seen, start = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    edge_id = tl.full((), VOCAB, tl.int32)
    while edge_id == VOCAB and start < VOCAB:
        at = start + tl.arange(0, BLOCK)
        s = _scores_at(row, at, peak, heat, VOCAB)
        equal = (s == edge).to(tl.int32)
        order = seen + tl.cumsum(equal, 0)
        edge_id = tl.min(tl.where((equal > 0) & (order == n), at, VOCAB), 0)
        seen += tl.sum(equal, 0)
        start += BLOCK
    return edge_id


@device_function
def _cut_row(
    index,
    logits,
    temperature,
    top_k,
    top_p,
    floors,
    peaks,
    edges,
    last_ids,
    stride,
    VOCAB: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write where a row is cut."""
    row = logits + index * stride
    heat = tl.load(temperature + index)
    least, peak = _ends_of(row, VOCAB, BLOCK)
    tl.store(peaks + index, peak)
    edge = tl.full((), -INFINITY, tl.float32)
    last = tl.full((), VOCAB, tl.int32)
    num_kept, num_ties = last, last
    if (heat > 0) & (peak < INFINITY) & (peak > -INFINITY):
        lowest = apply_temperature(least, peak, heat)
        if MIN_P:
            edge = tl.load(floors + index)
        if (lowest < edge) | (lowest == -INFINITY):
            lowest = _lowest_of(row, peak, heat, edge, VOCAB, BLOCK)
        if TOP_K:
            k = tl.load(top_k + index).to(tl.int32)
            if k < VOCAB:
                edge, above, num_ties = _search_edge(
                    row, peak, heat, lowest, k, VOCAB, False, BLOCK
                )
                lowest, num_kept = edge, tl.minimum(k - above, num_ties)
        if TOP_P:
            p = tl.load(top_p + index)
            if p < 1:
                mass = _mass_of(row, peak, heat, lowest, VOCAB, BLOCK)
                # Tokens at the edge of top_k that it drops do not count for the mass.
                mass -= tl.exp(lowest.to(tl.float64)) * (num_ties - num_kept)
                # Above 0, so that the best token is kept even if top_p is too small for float32.
                target = tl.maximum(p.to(tl.float64) * mass, LEAST_MASS)
                edge, before, ties = _search_edge(
                    row, peak, heat, lowest, target, VOCAB, True, BLOCK
                )
                fit = tl.ceil((target - before) / tl.exp(edge.to(tl.float64)))
                most = tl.where((edge == lowest) & (num_kept < num_ties), num_kept, ties)
                num_kept, num_ties = tl.minimum(fit, most.to(tl.float64)).to(tl.int32), ties
        if num_kept < num_ties:
            last = _nth_at(row, peak, heat, edge, num_kept, VOCAB, BLOCK)
    tl.store(edges + index, edge)
    tl.store(last_ids + index, last)


@triton.jit(
    do_not_specialize_on_alignment=(
        "temperature",
        "top_k",
        "top_p",
        "floors",
        "edges",
        "last_ids",
        "picks",
    ),
)
def cut_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    floors,
    peaks,
    edges,
    last_ids,
    picks,
    stride,
    VOCAB: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per undecided row.

    Rows that are not cut, greedy or invalid keep everything.
    """
    begin_next(PDL)
    wait_for_previous(PDL)
    index = tl.program_id(0).to(tl.int64)
    if tl.load(picks + index) == UNDECIDED:
        _cut_row(
            index,
            logits,
            temperature,
            top_k,
            top_p,
            floors,
            peaks,
            edges,
            last_ids,
            stride,
            VOCAB,
            TOP_K,
            TOP_P,
            MIN_P,
            BLOCK,
        )
        tl.store(picks + index, WHOLE)


def has_limits(sampling: Sampling) -> bool:
    """Whether some row may be cut off."""
    limits = (sampling.top_k, sampling.top_p, sampling.min_p)
    return any(limit is not None for limit in limits)


def find_cut(
    logits: Tensor, sampling: Sampling, *, pdl: bool = False, part: StepPart | None = None
) -> Cut | None:
    """The edges of rows, and tokens of those with few candidates; None if no row is cut.

    logits: [n, vocab] of any float type
    part: the part of a step's rows, if not all
    writes: logits, minus infinity for forbidden tokens, which are not part of the cut
    """
    if not has_limits(sampling):
        return None
    cut, floors = _allocate_cut(logits), _take_floors(sampling)
    where = (cut.peaks, cut.edges, cut.last_ids, cut.picks)
    sharing = part is not None and part.beside.is_active
    # Kernels that begin early hold registers while they wait; those of a cut hold enough to block
    # the other stream.
    early = pdl and not sharing
    survey = survey_groups_(logits, sampling, pdl=early, part=part)
    if part is not None and not part.is_some:
        # A kernel that fills the device keeps a processor's next operation waiting.
        part.beside.wait_for_mark()
    choose_tokens_(logits, sampling, survey, floors, *where, pdl=early, sharing=sharing)
    _search_cut_(logits, sampling, floors, cut, pdl=pdl and (part is None or not part.is_some))
    return cut


def cut_by_search(logits: Tensor, sampling: Sampling) -> Cut:
    """The cut by the search alone, for each row with one program."""
    cut = _allocate_cut(logits)
    cut.picks.fill_(UNDECIDED.value)
    _search_cut_(logits, sampling, _take_floors(sampling), cut, pdl=False)
    return cut


def _allocate_cut(logits: Tensor) -> Cut:
    """Arrays to be written."""
    numbers = torch.empty(4, len(logits), dtype=torch.float32, device=logits.device)
    last_ids, picks = numbers[2:].view(torch.int32)
    return Cut(peaks=numbers[0], edges=numbers[1], last_ids=last_ids, picks=picks)


def _take_floors(sampling: Sampling) -> Tensor | None:
    """The lowest scores that min-p keeps.   returns: [n] float32"""
    # By torch, so that borderline tokens are kept in both implementations.
    return None if sampling.min_p is None else sampling.min_p.log()


def _search_cut_(
    logits: Tensor, sampling: Sampling, floors: Tensor | None, cut: Cut, *, pdl: bool
) -> None:
    """Cut the rows that are undecided.   writes: cut"""
    rows, vocab = logits.shape
    block = min(2048, triton.next_power_of_2(max(vocab, 16)))
    pointers = (
        logits if column is None else column for column in (sampling.top_k, sampling.top_p, floors)
    )
    cut_kernel[(rows,)](
        logits,
        sampling.temperature,
        *pointers,
        cut.peaks,
        cut.edges,
        cut.last_ids,
        cut.picks,
        logits.stride(0),
        VOCAB=vocab,
        TOP_K=sampling.top_k is not None,
        TOP_P=sampling.top_p is not None,
        MIN_P=sampling.min_p is not None,
        BLOCK=block,
        num_warps=max(block // 128, 1),
        **launch_options(pdl),
    )
