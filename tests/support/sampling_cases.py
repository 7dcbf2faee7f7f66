"""Sampling by `triton` beside torch's: on a GPU, or on a CPU by Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve
from near_processor import Near
from torch import Tensor

from headstock.nn import sampler as torch_sampler
from headstock.spi import LogitColumn, LogitsProcessor, Processing, Sampling
from headstock_conformance.ops.sampling import SETTINGS, compare_samples, logits_of, sampling_of
from headstock_triton.sampling import sampler
from headstock_triton.sampling.shard import fused_sample_shard
from headstock_triton.sampling.truncation import cut_by_search, find_cut

__all__ = [
    "SETTINGS",
    "Lift",
    "compare_cut",
    "cut_case",
    "logits_of",
    "processed_case",
    "sampling_case",
    "sampling_of",
    "shard_case",
]


class Lift(LogitsProcessor):
    """Lifts every seventh token, from another one on at each position."""

    @property
    def columns(self) -> Mapping[str, LogitColumn]:
        """By how much."""
        return {"lift": LogitColumn(neutral=0.0)}

    @property
    def changes_argmax(self) -> bool:
        """Another token may be the best."""
        return True

    def row(self, args: Any, prompt: Any, vocab: int) -> None:
        """Never called."""

    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """Add to them."""
        tokens = torch.arange(logits.shape[1], device=logits.device)
        is_lifted = (tokens + at[:, None]) % 7 == 0
        return torch.where(is_lifted, logits + columns["lift"][:, None], logits)


def processed_case(
    rows: int,
    vocab: int,
    dtype: torch.dtype,
    device: str,
    settings: dict[str, Any],
    names: str,
    which: list[int],
    **more: Any,
) -> None:
    """Processed rows have the tokens that torch gives them, and the others theirs.

    names: of the processors, in their order    which: the processed rows
    """
    logits = logits_of(rows, vocab, dtype, device)
    values = torch.tensor(which, device=device).float() / 4
    made = {"near": (Near(), {"reach": values + 0.5}), "lift": (Lift(), {"lift": values + 2})}
    processing = Processing(
        rows=torch.tensor(which, device=device),
        parts=tuple(made[name] for name in names.split()),
    )
    if not settings:
        more["positions"] = torch.arange(rows, device=device) * 1009
    asked = sampling_of(rows, device, settings, processing=processing, **more)
    expected = torch_sampler.sample(logits.to(torch.float32, copy=True), asked)
    found = sampler.fused_sample(logits.clone(), asked)
    assert torch.equal(found.healthy, expected.healthy)
    sound = expected.healthy
    assert torch.equal(found.tokens[sound], expected.tokens[sound])


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
    return compare_samples(found, expected, logits, asked)


def shard_case(
    rows: int, vocab: int, dtype: torch.dtype, device: str, settings: dict[str, Any], **more: Any
) -> float:
    """Ranks with a part of the vocabulary each sample what torch samples of whole rows.

    returns: the share of rows with another token, where torch's scores differ by a rounding
    """
    logits, asked = (
        logits_of(rows, vocab, dtype, device),
        sampling_of(rows, device, settings, **more),
    )
    logits[0, 0] = logits[0, -1] = (
        logits[0].abs().max() + 1
    )  # equal, on the first rank and the last
    logits[1, -1] = math.nan
    logits[2, vocab // 2 :] = -math.inf
    logits[3] = -math.inf
    width = -(-vocab // 96) * 32
    owns = [
        range(min(first, vocab), min(first + width, vocab)) for first in range(0, 3 * width, width)
    ]
    padded = torch.nn.functional.pad(logits, (0, 3 * width - vocab), value=99.0).split(width, 1)
    sent: list[Tensor] = []

    def send(part: Tensor) -> Tensor:
        sent.append(part)
        return part

    settings_of = [asked] * 3
    if asked.mask is not None:
        words = torch.nn.functional.pad(asked.mask, (0, 3 * width // 32 - asked.mask.shape[1]))
        settings_of = [evolve(asked, mask=each) for each in words.split(width // 32, 1)]
    ranks = list(zip(padded, settings_of, owns, strict=True))
    for part, own_settings, own in ranks:
        fused_sample_shard(part.clone(), own_settings, own, send)
    joined = torch.cat(sent, -1)
    expected = torch_sampler.sample(logits.to(torch.float32, copy=True), asked)
    shares = []
    for part, own_settings, own in ranks:
        found = fused_sample_shard(part.clone(), own_settings, own, lambda _: joined)
        assert bool(((found.tokens >= 0) & (found.tokens < vocab)).all())
        shares.append(compare_samples(found, expected, logits, asked))
    return max(shares)


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
    if asked.seeds is None:
        zeros = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        asked = evolve(asked, seeds=zeros, positions=zeros)
    wide = logits.float()
    scores = (wide - wide.amax(-1, keepdim=True)) / asked.temperature.clamp(min=1e-6)[:, None]
    at = torch.arange(scores.shape[-1], device=scores.device)
    kept = torch_cut(scores, asked) > -math.inf
    rows = (asked.temperature > 0) & ~scores.isnan().any(-1)
    for way in (cut_by_search, find_cut):
        found = way(logits, asked)
        assert found is not None
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
