"""Sampling by `triton` beside torch's: on a GPU, or on a CPU by Triton's interpreter."""

from __future__ import annotations

import math
from typing import Any

import torch
from ops_cases import noise
from torch import Tensor

from headstock.nn import sampler as torch_sampler
from headstock.spi import Sample, Sampling
from headstock_triton import sampler
from headstock_triton.truncation import cut_by_search, cut_by_sorting

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"temperature": 1.0, "top_k": 40},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "min_p": {"temperature": 0.7, "min_p": 0.02},
    "all": {"temperature": 1.2, "top_k": 200, "top_p": 0.95, "min_p": 1e-4},
}
"""What rows of a sampling case ask for."""


def logits_of(rows: int, vocab: int, dtype: torch.dtype, device: str) -> Tensor:
    """Logits with ties (every second row has few different ones), and from 6 rows on two rows that
    are not sound.
    """
    logits = noise(rows, vocab, dtype=torch.float32, device=device, scale=3.0)
    logits[1::2] = logits[1::2].mul(2).round().div(2)
    if rows >= 6:
        logits[2, vocab // 2], logits[4] = math.nan, -math.inf
        logits[5, vocab // 3 :] = -math.inf
    return logits.to(dtype)


def sampling_of(rows: int, device: str, settings: dict[str, Any], **more: Any) -> Sampling:
    """Every row with the same settings, but for one greedy row, and a seed and a position of its
    own.
    """
    if not settings:
        return Sampling(**more)
    each = {name: torch.full((rows,), value, device=device) for name, value in settings.items()}
    if rows > 3:
        each["temperature"][3] = 0.0
    seeds = torch.arange(rows, device=device) * 0x9E3779B97F4A7C1 - 5
    return Sampling(**each, **more, seeds=seeds, positions=torch.arange(rows, device=device) * 1009)


def sampling_case(
    rows: int, vocab: int, dtype: torch.dtype, device: str, settings: dict[str, Any], **more: Any
) -> float:
    """Tokens and log-probabilities. Where another token is taken, torch's scores of the two differ
    by a rounding.

    returns: the share of rows with another token
    """
    logits, asked = (
        logits_of(rows, vocab, dtype, device),
        sampling_of(rows, device, settings, **more),
    )
    expected = torch_sampler.sample(logits.to(torch.float32, copy=True), asked)
    found = sampler.fused_sample(logits.clone(), asked)
    assert bool((found.healthy == expected.healthy).all()), "other rows are healthy"
    assert bool(((found.tokens >= 0) & (found.tokens < vocab)).all())
    sound = found.healthy
    others = sound & (found.tokens != expected.tokens)
    if bool(others.any()):
        assert asked.temperature is not None, "greedy rows have another token"
        scores = torch_sampler.gumbel_scores(logits.float(), asked.temperature, asked)
        ours, theirs = (scores.gather(1, each.tokens[:, None])[:, 0] for each in (found, expected))
        assert bool((theirs - ours)[others].max() < 1e-4), (
            f"tokens that torch rates lower, in {int(others.sum())} rows"
        )
        assert bool((asked.temperature[others] > 0).all()), "greedy rows have another token"
    check_logprobs(found, expected, sound & ~others)
    return float(others.float().mean())


def check_logprobs(found: Sample, expected: Sample, rows: Tensor) -> None:
    """Log-probabilities and alternatives are the same."""
    assert (found.logprobs is None) == (expected.logprobs is None)
    if found.logprobs is None:
        return
    # a ban may have made a row with NaN sound
    close = {"atol": 2e-5, "rtol": 1e-5, "equal_nan": True}
    torch.testing.assert_close(found.logprobs[rows], expected.logprobs[rows], **close)
    torch.testing.assert_close(found.top_logprobs[rows], expected.top_logprobs[rows], **close)
    assert torch.equal(found.top_ids[rows], expected.top_ids[rows])


def cut_case(
    rows: int, vocab: int, dtype: torch.dtype, device: str, settings: dict[str, Any]
) -> float:
    """Which tokens stay is what torch keeps, ties included.

    returns: the share of tokens that stay
    """
    logits, asked = logits_of(rows, vocab, dtype, device), sampling_of(rows, device, settings)
    return compare_cut(logits, asked)


def compare_cut(logits: Tensor, asked: Sampling) -> float:
    """See `cut_case`; greedy and unsound rows are left out."""
    assert asked.temperature is not None
    wide = logits.float()
    scores = (wide - wide.amax(-1, keepdim=True)) / asked.temperature.clamp(min=1e-6)[:, None]
    at = torch.arange(scores.shape[-1], device=scores.device)
    kept = torch_cut(scores, asked) > -math.inf
    rows = (asked.temperature > 0) & ~scores.isnan().any(-1)
    for way in (cut_by_search, cut_by_sorting):
        found = way(logits, asked)
        edges, last = found.edges[:, None], found.last_ids[:, None]
        stays = ((scores > edges) | ((scores == edges) & (at <= last))) & (scores > -math.inf)
        wrong = (stays != kept)[rows].sum(-1)
        off = (
            f"{int((wrong > 0).sum())} rows of {int(rows.sum())} differ, by up to "
            f"{int(wrong.max())} tokens"
        )
        assert int(wrong.max()) == 0, f"{way.__name__}: {off}"
    return float(kept[rows].float().mean())


def torch_cut(scores: Tensor, asked: Sampling) -> Tensor:
    """The scores with minus infinity where torch cuts."""
    if asked.min_p is not None:
        scores = torch_sampler.apply_min_p(scores, asked.min_p)
    if asked.top_k is not None or asked.top_p is not None:
        scores = torch_sampler.apply_top_k_top_p(scores, asked.top_k, asked.top_p)
    return scores
