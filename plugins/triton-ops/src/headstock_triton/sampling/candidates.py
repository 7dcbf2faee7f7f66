"""Sampling from rows whose top-k, top-p and min-p keep few tokens, without reading a row twice.

`survey.py` reads each row once: the highest logit of each group of 128 tokens and, for top-p, the
weight of each group. The maxima of k groups are k tokens, so the k-th highest maximum bounds the
k-th best token from below, and the maxima of some groups weigh no more than their tokens. That
bounds the edge of a cut, and `choose_kernel` reads those groups again whose maximum reaches the
bound. Their tokens down to the bound are the candidates: the rank of each, and the weight of better
ones, are sums over pairs. The row's token has the best sum of score and Gumbel noise among those
kept.

Rows with too many candidates use the search of `truncation.py`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstock.spi import Sampling
from headstock_triton.device_function import device_function
from headstock_triton.pdl import begin_next, launch_options, wait_for_previous
from headstock_triton.sampling.masks import FEW_ROWS
from headstock_triton.sampling.noise import gumbel_of, philox_word
from headstock_triton.sampling.survey import (
    GROUP,
    MASS_ERROR,
    Survey,
    find_bound,
    order_keys,
)
from headstock_triton.sampling.temperature import apply_temperature

INFINITY = tl.constexpr(math.inf)
LEAST_MASS = tl.constexpr(1e-300)
NEGLIGIBLE = tl.constexpr(-60.0)
"""Score below which exp() does not change a float64 sum that includes 1, for any vocabulary."""

CAPACITY = tl.constexpr(512)
"""Number of candidates, and of their groups, up to which comparing pairs beats a search."""
MIN_P_GROUPS = tl.constexpr(128)
"""The same for rows that only min-p cuts: their edge is known, so reading again is wasted."""
TILE = tl.constexpr(128)
OTHERS = tl.constexpr(32)
"""Number of candidates compared at a time, and with how many."""
HIGHEST_KEY = tl.constexpr(0x7F7FFFFF)
"""The key of the lowest finite score."""

WHOLE = tl.constexpr(-1)
"""Instead of a token: it must still be sampled from the rest of the cut row."""
UNDECIDED = tl.constexpr(-2)
"""Instead of a token: the row's edge must still be searched for."""

UNALIGNED = (
    "temperature",
    "top_k",
    "top_p",
    "floors",
    "seeds",
    "positions",
    "maxima",
    "masses",
    "peaks",
    "edges",
    "last_ids",
    "picks",
)


@device_function
def _sum_mass(row, peak, heat, VOCAB: tl.constexpr):
    """The sum of exp(score) of a row, in float64."""
    block: tl.constexpr = 2048
    mass = tl.zeros((block,), tl.float64)
    for start in range(0, VOCAB, block):
        at = start + tl.arange(0, block)
        x = tl.load(row + at, at < VOCAB, other=-INFINITY).to(tl.float32)
        s = apply_temperature(x, peak, heat)
        if tl.max(s, 0) > NEGLIGIBLE:
            mass += tl.exp(s.to(tl.float64))
    return tl.sum(mass, 0)


@device_function
def _collect(
    row,
    listed,
    scores,
    ids,
    keys,
    bound,
    peak,
    heat,
    most_groups,
    is_weighed,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    READ: tl.constexpr,
    WEIGH: tl.constexpr,
):
    """Write scores and ids of the tokens whose key is the bound or lower.

    returns: their number, above the capacity if they or their groups are too many; and, if
        requested, the weight of all tokens of these groups
    """
    group = tl.arange(0, BLOCK)
    is_read = keys <= bound
    num_groups = tl.sum(is_read.to(tl.int32), 0)
    order = tl.cumsum(is_read.to(tl.int32), 0) - 1
    tl.store(listed + order, group, is_read & (order < CAPACITY))
    # Values written by other threads of the program are read from here on.
    tl.debug_barrier()
    mass = tl.zeros((), tl.float64)
    count = tl.where(num_groups > most_groups, CAPACITY + 1, 0)
    start = tl.zeros((), tl.int32)
    while (start < num_groups) & (count <= CAPACITY):
        which = start + tl.arange(0, READ)
        first = tl.load(listed + which, which < num_groups, other=BLOCK) * GROUP
        at = first[:, None] + tl.arange(0, GROUP)[None, :]
        exists = (which < num_groups)[:, None] & (at < VOCAB)
        x = tl.load(row + at, exists, other=-INFINITY).to(tl.float32)
        s = apply_temperature(x, peak, heat)
        if WEIGH and is_weighed:
            mass += tl.sum(tl.sum(tl.exp(s.to(tl.float64)), 1), 0)
        stays = tl.reshape((order_keys(s) <= bound).to(tl.int32), (READ * GROUP,))
        place = count + tl.cumsum(stays, 0) - 1
        fits = (stays > 0) & (place < CAPACITY)
        tl.store(scores + place, tl.reshape(s, (READ * GROUP,)), fits)
        tl.store(ids + place, tl.reshape(at, (READ * GROUP,)), fits)
        count += tl.sum(stays, 0)
        start += READ
    tl.debug_barrier()
    return count, mass


@device_function
def _load_codes(scores, ids, at, count):
    """Scores of candidates, and their sort keys: lower is better."""
    exists = at < count
    s = tl.load(scores + at, exists, other=-INFINITY)
    token = tl.load(ids + at, exists, other=0)
    return s, (order_keys(s).to(tl.int64) << 32) | token.to(tl.int64)


@device_function
def _compare(scores, ids, ranks, befores, count, k, TOP_P: tl.constexpr):
    """Write how many candidates are better than each, and their weight.

    returns: the weight of the k best
    """
    mass = tl.zeros((), tl.float64)
    start = tl.zeros((), tl.int32)
    while start < count:
        at = start + tl.arange(0, TILE)
        s, code = _load_codes(scores, ids, at, count)
        rank = tl.zeros((TILE,), tl.int32)
        before = tl.zeros((TILE,), tl.float64)
        other = tl.zeros((), tl.int32)
        while other < count:
            others = other + tl.arange(0, OTHERS)
            their_s, theirs = _load_codes(scores, ids, others, count)
            better = theirs[None, :] < code[:, None]
            rank += tl.sum(better.to(tl.int32), 1)
            if TOP_P:
                weight = tl.exp(their_s.to(tl.float64))
                before += tl.sum(tl.where(better, weight[None, :], 0.0), 1)
            other += OTHERS
        tl.store(ranks + at, rank, at < count)
        if TOP_P:
            tl.store(befores + at, before, at < count)
            mass += tl.sum(tl.where(rank < k, tl.exp(s.to(tl.float64)), 0.0), 0)
        start += TILE
    tl.debug_barrier()
    return mass


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def choose_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    floors,
    seeds,
    positions,
    maxima,
    masses,
    numbers,
    befores,
    peaks,
    edges,
    last_ids,
    picks,
    stride,
    VOCAB: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    READ: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row: its edge and its token, or the work that remains.

    Rows that are not cut, greedy or invalid keep everything.
    READ: number of groups read at a time
    """
    begin_next(PDL)
    wait_for_previous(PDL)
    index = tl.program_id(0).to(tl.int64)
    row, source = logits + index * stride, index * GROUPS
    scores = numbers + index * 4 * CAPACITY
    ids = scores.to(tl.pointer_type(tl.int32)) + CAPACITY
    ranks, listed = ids + CAPACITY, ids + 2 * CAPACITY
    befores += index * CAPACITY
    group = tl.arange(0, BLOCK)
    # Everything is loaded before the first sum, for which the threads wait.
    highest = tl.load(maxima + source + group, group < GROUPS, other=-INFINITY)
    heat = tl.load(temperature + index)
    k, p = tl.full((), VOCAB, tl.int32), tl.full((), 1.0, tl.float32)
    floor = tl.full((), -INFINITY, tl.float32)
    own = tl.zeros((BLOCK,), tl.float32)
    if TOP_K:
        k = tl.minimum(tl.load(top_k + index), VOCAB).to(tl.int32)
    if TOP_P:
        p = tl.load(top_p + index)
        own = tl.load(masses + source + group, group < GROUPS, other=0.0)
    if MIN_P:
        floor = tl.load(floors + index)
    seed, position = tl.load(seeds + index), tl.load(positions + index)
    peak = tl.max(highest, 0)
    edge = tl.full((), -INFINITY, tl.float32)
    last, pick = tl.full((), VOCAB, tl.int32), tl.full((), WHOLE, tl.int32)
    is_cut = (k < VOCAB) | (p < 1) | (floor > -INFINITY)
    if is_cut & (heat > 0) & (peak < INFINITY) & (peak > -INFINITY):
        tops = apply_temperature(highest, peak, heat)
        keys = order_keys(tops)
        limit = tl.minimum(order_keys(floor), HIGHEST_KEY)
        bound = limit
        # With top-k or min-p, top-p only weighs the candidates.
        is_weighed = (p < 1) & (k == VOCAB) & (floor == -INFINITY)
        rest = tl.zeros((), tl.float64)
        mass = tl.zeros((BLOCK,), tl.float64)
        weights, target = tl.full((BLOCK,), 1.0, tl.float32), k.to(tl.float32)
        if TOP_P and is_weighed:
            exact = tl.exp(tops.to(tl.float64))
            weights, mass = exact.to(tl.float32), own.to(tl.float64) * exact
            target = (p.to(tl.float64) * tl.sum(mass, 0) * (1 + MASS_ERROR)).to(tl.float32)
        if is_weighed | (k < VOCAB):
            bound = tl.minimum(find_bound(keys, weights, target), limit)
        if TOP_P:
            rest = tl.sum(tl.where(keys > bound, mass, 0.0), 0)
        is_ranked = (k < VOCAB) | (p < 1)
        count, mass = _collect(
            row,
            listed,
            scores,
            ids,
            keys,
            bound,
            peak,
            heat,
            tl.where(is_ranked, CAPACITY, MIN_P_GROUPS),
            is_weighed,
            VOCAB,
            BLOCK,
            READ,
            TOP_P,
        )
        if count <= CAPACITY:
            mass_kept = tl.zeros((), tl.float64)
            if is_ranked:
                mass_kept = _compare(scores, ids, ranks, befores, count, k, TOP_P)
            at = tl.arange(0, CAPACITY)
            s, code = _load_codes(scores, ids, at, count)
            stays = at < count
            if is_ranked:
                stays = stays & (tl.load(ranks + at, at < count, other=VOCAB) < k)
            is_enough = p == p
            if TOP_P:
                before = tl.load(befores + at, at < count, other=INFINITY)
                if p < 1:
                    least, most = mass_kept, mass_kept
                    if is_weighed:
                        error = rest * MASS_ERROR
                        least, most = mass + rest - error, mass + rest + error
                        share = p.to(tl.float64)
                        between = (before >= share * least) & (before < share * most)
                        if tl.max(between.to(tl.int32), 0) > 0:
                            least = _sum_mass(row, peak, heat, VOCAB)
                            most = least
                        is_enough = mass_kept >= share * most
                    # Above 0, so that the best token is kept even if top_p is too small for
                    # float32.
                    stays = stays & (before < tl.maximum(p.to(tl.float64) * most, LEAST_MASS))
            if is_enough:
                worst = tl.max(tl.where(stays, code, -1), 0)
                edge = -(worst >> 32).to(tl.int32).to(tl.float32, bitcast=True)
                last = worst.to(tl.int32)
                token = code.to(tl.int32)
                words = philox_word(seed, position, token)
                values = tl.where(stays, s + gumbel_of(words), -INFINITY)
                best = tl.max(values, 0)
                pick = tl.min(tl.where(stays & (values == best), token, VOCAB), 0)
            else:
                pick = tl.full((), UNDECIDED, tl.int32)
        elif is_ranked:
            pick = tl.full((), UNDECIDED, tl.int32)
        else:
            edge = floor
    tl.store(peaks + index, peak)
    tl.store(edges + index, edge)
    tl.store(last_ids + index, last)
    tl.store(picks + index, pick)


def choose_tokens_(
    logits: Tensor,
    sampling: Sampling,
    survey: Survey,
    floors: Tensor | None,
    peaks: Tensor,
    edges: Tensor,
    last_ids: Tensor,
    picks: Tensor,
    *,
    pdl: bool,
    sharing: bool,
) -> None:
    """The edges of rows with few candidates, and their tokens.

    logits: [n, vocab] of any float type, minus infinity for forbidden tokens
    floors: [n] float32, the lowest scores that min-p keeps
    sharing: whether kernels of another stream run at the same time
    writes: peaks, edges [n] float32; last_ids, picks [n] int32; a pick is the token, `WHOLE` or
        `UNDECIDED`
    """
    rows, vocab = logits.shape
    groups = triton.cdiv(vocab, GROUP.value)
    device = logits.device
    maxima, masses = survey.maxima, survey.masses
    numbers = torch.empty(rows, 4, CAPACITY.value, dtype=torch.float32, device=device)
    has_top_p = sampling.top_p is not None
    befores = (
        torch.empty(rows, CAPACITY.value, dtype=torch.float64, device=device)
        if has_top_p
        else numbers
    )
    # Each missing pointer is replaced by one that this variant of the kernel does not read.
    temperature, top_k, top_p, low, seeds, positions = (
        maxima if column is None else column
        for column in (
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            floors,
            sampling.seeds,
            sampling.positions,
        )
    )
    has_top_k, few = sampling.top_k is not None, rows <= FEW_ROWS
    choose_kernel[(rows,)](
        logits,
        temperature,
        top_k,
        top_p,
        low,
        seeds,
        positions,
        maxima,
        masses,
        numbers,
        befores,
        peaks,
        edges,
        last_ids,
        picks,
        logits.stride(0),
        VOCAB=vocab,
        TOP_K=has_top_k,
        TOP_P=has_top_p,
        MIN_P=floors is not None,
        GROUPS=groups,
        BLOCK=triton.next_power_of_2(groups),
        # This is faster for few rows, and for many next to others, but not for many alone.
        READ=8 if few or sharing else 16,
        num_warps=8,
        **launch_options(pdl),
    )
