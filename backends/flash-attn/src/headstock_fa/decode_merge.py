"""The merge of partial results by the last program of a row's KV head."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from headstock_fa.pdl import INTERPRETED

LN_2 = tl.constexpr(math.log(2))


@triton.jit
def _load_parts(
    part_sums,
    part_peaks,
    first,
    begin,
    used,
    group,
    d,
    heads: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Sums and highest scores of the parts from `begin`: [merged, group, dim], [merged, group]."""
    split = begin + tl.arange(0, MERGED)
    at = (first + split)[:, None] * heads + group[None, :]
    there = (split < used)[:, None] & (group < heads)[None, :]
    sums = tl.load(
        part_sums + at[:, :, None] * HEAD_DIM + d[None, None, :],
        there[:, :, None] & (d < HEAD_DIM)[None, None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    peaks = tl.load(part_peaks + at, there, other=-float("inf"), cache_modifier=".cg")
    return sums, peaks


@triton.jit
def merge_parts(
    part_sums,
    part_peaks,
    part_masses,
    first,
    used,
    answer,
    lse,
    heads: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGED: tl.constexpr,
    GROUP: tl.constexpr,
    LSE: tl.constexpr,
):
    """All parts of a KV head, in order; bypassing the first-level cache, as other programs wrote
    them.

    writes: answer, lse
    """
    group, d = tl.arange(0, GROUP), tl.arange(0, DIM)
    # Request the first sums before waiting for any value.
    sums, peaks = _load_parts(
        part_sums, part_peaks, first, 0, used, group, d, heads, HEAD_DIM, MERGED
    )
    split = tl.arange(0, SPLITS)
    at = (first + split)[:, None] * heads + group[None, :]
    there = (split < used)[:, None] & (group < heads)[None, :]
    all_peaks = tl.load(part_peaks + at, there, other=-float("inf"), cache_modifier=".cg")
    masses = tl.load(part_masses + at, there, other=0.0, cache_modifier=".cg")
    peak = tl.max(all_peaks, 0)
    # Heads that only pad the group have no peak.
    level = tl.where(group < heads, peak, 0.0)
    mass = tl.sum(masses * tl.exp2(all_peaks - level[None, :]), 0)
    mass = tl.where(group < heads, mass, 1.0)
    total = tl.sum(sums * tl.exp2(peaks - level[None, :])[:, :, None], 0)
    if INTERPRETED:
        begin = tl.zeros((), tl.int32) + MERGED
        while begin < used:
            sums, peaks = _load_parts(
                part_sums, part_peaks, first, begin, used, group, d, heads, HEAD_DIM, MERGED
            )
            total += tl.sum(sums * tl.exp2(peaks - level[None, :])[:, :, None], 0)
            begin += MERGED
    else:
        for later in range(MERGED, used, MERGED):
            sums, peaks = _load_parts(
                part_sums, part_peaks, first, later, used, group, d, heads, HEAD_DIM, MERGED
            )
            total += tl.sum(sums * tl.exp2(peaks - level[None, :])[:, :, None], 0)
    there = (group < heads)[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(
        answer + group[:, None] * HEAD_DIM + d[None, :],
        (total / mass[:, None]).to(answer.dtype.element_ty),
        there,
    )
    if LSE:
        tl.store(lse + group, (peak + tl.log2(mass)) * LN_2, group < heads)
