"""Scores with ties and invalid rows, and the tokens sampled from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from headstock.nn import sampler
from headstock.ops.torch_ops import TorchOps
from headstock.spi import LogitColumn, LogitsProcessor, Ops, Processing, Sample, Sampling
from headstock.spi.arrays import Ints
from headstock_conformance.ops.cases import noise

SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "greedy": {},
        "temperature": {"temperature": 0.6},
        "top_k": {"temperature": 1.0, "top_k": 40},
        "top_p": {"temperature": 0.8, "top_p": 0.9},
        "min_p": {"temperature": 0.7, "min_p": 0.02},
        "all": {"temperature": 1.2, "top_k": 200, "top_p": 0.95, "min_p": 1e-4},
    }
)
"""The settings of rows of a sampling case."""


VOCAB, MASK_VOCAB = 700, 70
"""Tokens of the cases' vocabularies."""


def logits_of(rows: int, vocab: int, dtype: torch.dtype, device: str) -> Tensor:
    """Logits with ties (every second row has few distinct values), and from 6 rows on two invalid
    rows.
    """
    logits = noise(rows, vocab, dtype=torch.float32, device=device, scale=3.0)
    logits[1::2] = logits[1::2].mul(2).round().div(2)
    if rows >= 6:
        logits[2, vocab // 2], logits[4] = math.nan, -math.inf
        logits[5, vocab // 3 :] = -math.inf
    return logits.to(dtype)


def sampling_of(rows: int, device: str, settings: Mapping[str, Any], **more: Any) -> Sampling:
    """Every row has the same settings, except one greedy row, and its own seed and position."""
    if not settings:
        return Sampling(**more)
    columns: dict[str, Any] = {
        name: torch.full((rows,), value, device=device) for name, value in settings.items()
    }
    if rows > 3:
        columns["temperature"][3] = 0.0
    seeds = torch.arange(rows, device=device) * 0x9E3779B97F4A7C1 - 5
    return Sampling(
        **columns, **more, seeds=seeds, positions=torch.arange(rows, device=device) * 1009
    )


def compare_samples(actual: Sample, expected: Sample, logits: Tensor, sampling: Sampling) -> float:
    """Tokens and log-probabilities. If another token is sampled, torch's scores of the two differ
    by rounding only.

    returns: the share of rows with another token
    """
    assert bool((actual.healthy == expected.healthy).all()), "other rows are healthy"
    tokens = actual.tokens
    assert bool(((tokens >= 0) & (tokens < logits.shape[-1])).all()), (
        "a token outside the vocabulary"
    )
    sound = actual.healthy
    others = sound & (tokens != expected.tokens)
    if bool(others.any()):
        assert sampling.temperature is not None, "greedy rows have another token"
        scores = sampler.gumbel_scores(logits.float(), sampling.temperature, sampling)
        ours, theirs = (
            scores.gather(1, sample.tokens[:, None])[:, 0] for sample in (actual, expected)
        )
        assert bool((theirs - ours)[others].max() < 1e-4), (
            f"tokens that torch rates lower, in {int(others.sum())} rows"
        )
        assert bool((sampling.temperature[others] > 0).all()), "greedy rows have another token"
    check_logprobs(actual, expected, sound & ~others)
    return float(others.float().mean())


def check_logprobs(actual: Sample, expected: Sample, rows: Tensor) -> None:
    """Log-probabilities and alternatives are the same."""
    assert (actual.logprobs is None) == (expected.logprobs is None), (
        "log-probabilities are returned without a request, or missing"
    )
    if actual.logprobs is None or expected.logprobs is None:
        return
    assert actual.top_logprobs is not None and expected.top_logprobs is not None
    assert actual.top_ids is not None and expected.top_ids is not None
    # a ban may have removed the NaN of a row
    close: dict[str, Any] = {"atol": 2e-5, "rtol": 1e-5, "equal_nan": True}
    torch.testing.assert_close(actual.logprobs[rows], expected.logprobs[rows], **close)
    torch.testing.assert_close(actual.top_logprobs[rows], expected.top_logprobs[rows], **close)
    assert torch.equal(actual.top_ids[rows], expected.top_ids[rows]), "other alternatives"
    # If operations return none, headstock computes them.
    if actual.ranks is not None and expected.ranks is not None:
        assert torch.equal(actual.ranks[rows], expected.ranks[rows]), "other ranks"


def check_sampling(ops: Ops, device: str, settings: Mapping[str, Any]) -> None:
    """A set's samples are torch's, with and without log-probabilities."""
    rows, vocab = 9, VOCAB
    for top_logprobs in (-1, 0, 3):
        logits = logits_of(rows, vocab, torch.float32, device)
        sampling = sampling_of(rows, device, settings, top_logprobs=top_logprobs)
        expected = TorchOps().sample(logits.clone(), sampling)
        compare_samples(ops.sample(logits.clone(), sampling), expected, logits, sampling)


def check_mask(ops: Ops, device: str) -> None:
    """No token outside the mask is sampled."""
    rows, vocab = 4, MASK_VOCAB
    logits = noise(rows, vocab, dtype=torch.float32, device=device, scale=3.0)
    allowed = torch.arange(vocab, device=device) % 3 == 1
    bits = torch.zeros(96, dtype=torch.int64, device=device)
    bits[:vocab] = allowed
    words = (bits.view(3, 32) << torch.arange(32, device=device)).sum(-1)
    packed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    for settings in ({}, {"temperature": 1.0}):
        sampling = evolve(
            sampling_of(rows, device, settings), mask=packed.expand(rows, -1).contiguous()
        )
        tokens = ops.sample(logits.clone(), sampling).tokens
        assert bool(allowed[tokens].all()), "forbidden tokens are sampled"


class KeepFew(LogitsProcessor):
    """Keeps the scores that are at most `reach` below the best one."""

    @property
    def columns(self) -> Mapping[str, LogitColumn]:
        """How far to reach."""
        return {"reach": LogitColumn(neutral=math.inf)}

    @property
    def changes_argmax(self) -> bool:
        """The best token stays."""
        return False

    def row(self, args: Any, prompt: Ints, vocab: int) -> None:
        """No request comes here."""

    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """Drop the others."""
        floor = logits.amax(-1, keepdim=True) - columns["reach"][:, None]
        return logits.masked_fill_(logits < floor, -math.inf)


class LiftSome(LogitsProcessor):
    """Adds `lift` to every seventh score, from another token on at each position."""

    @property
    def columns(self) -> Mapping[str, LogitColumn]:
        """By how much."""
        return {"lift": LogitColumn(neutral=0.0)}

    @property
    def changes_argmax(self) -> bool:
        """Another token may be the best."""
        return True

    def row(self, args: Any, prompt: Ints, vocab: int) -> None:
        """No request comes here."""

    def apply(self, logits: Tensor, at: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """Add to them."""
        tokens = torch.arange(logits.shape[1], device=logits.device)
        return logits + ((tokens + at[:, None]) % 7 == 0) * columns["lift"][:, None]


def check_processors(ops: Ops, device: str) -> None:
    """Rows with processors have torch's tokens, and so have the other rows."""
    rows, vocab = 9, VOCAB
    for which in (None, [7], [1, 8, 3, 3]):
        picked = torch.tensor(range(rows) if which is None else which, device=device)
        values = picked.float()
        parts = (
            (LiftSome(), {"lift": values}),
            (KeepFew(), {"reach": 0.5 + values / 4}),
        )
        for name, used in (("all", parts), ("temperature", parts[1:]), ("greedy", parts[:1])):
            processing = Processing(rows=None if which is None else picked, parts=used)
            more: dict[str, Any] = {"processing": processing}
            if not SETTINGS[name]:
                more["positions"] = torch.arange(rows, device=device) * 1009
            check_same(ops, rows, vocab, device, SETTINGS[name], **more)


def check_rules(ops: Ops, device: str) -> None:
    """Bans, biases, penalties and the targets of log-probabilities are torch's."""
    rows, vocab = 9, VOCAB
    row_ids = torch.arange(rows, device=device)
    rules: dict[str, dict[str, Any]] = {
        "bans": {"banned": torch.arange(vocab, device=device).expand(rows, -1) % 3 == 0},
        "biases": {"bias": noise(rows, vocab, dtype=torch.float32, device=device, seed=9)},
        "penalties": {
            "repetition": 1.1 + row_ids / 10,
            "presence": row_ids / 4,
            "frequency": row_ids / 8,
            # The likeliest tokens, which are sampled unless penalized.
            "history": logits_of(rows, vocab, torch.float32, device).topk(20, -1).indices,
            "history_lens": row_ids + 11,
            "prompt_lens": row_ids // 2 + 1,
        },
        "targets": {"targets": row_ids * 7 - 1, "top_logprobs": 2},
    }
    for rule, more in rules.items():
        for name in ("greedy", "temperature", "all"):
            try:
                check_same(ops, rows, vocab, device, SETTINGS[name], **more)
            except AssertionError as error:
                raise AssertionError(f"{rule}: {error}") from error


def check_same(
    ops: Ops, rows: int, vocab: int, device: str, settings: Mapping[str, Any], **more: Any
) -> None:
    """Raise AssertionError if a set samples other tokens than torch."""
    logits = logits_of(rows, vocab, torch.float32, device)
    sampling = sampling_of(rows, device, settings, **more)
    expected = TorchOps().sample(logits.clone(), sampling)
    actual = ops.sample(logits.clone(), sampling)
    assert bool((actual.healthy == expected.healthy).all()), "other rows are healthy"
    others = expected.healthy & (actual.tokens != expected.tokens)
    if bool(others.any()):
        scores = sampler.score_tokens(logits.clone(), sampling)
        ours, theirs = (
            scores.gather(1, sample.tokens[:, None])[:, 0] for sample in (actual, expected)
        )
        off = (theirs - ours)[others].max()
        assert bool(off < 1e-4), f"tokens that torch rates lower, in {int(others.sum())} rows"
    check_logprobs(actual, expected, expected.healthy & ~others)
