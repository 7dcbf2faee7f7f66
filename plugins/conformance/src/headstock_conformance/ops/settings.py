"""Each sampling setting alone and combined with others, for few rows and hundreds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from headstock.nn import sampler
from headstock.ops.torch_ops import TorchOps
from headstock.spi import Ops, Sample, Sampling
from headstock_conformance.ops.cases import noise
from headstock_conformance.ops.models import draw_weights, make_plain
from headstock_conformance.ops.sampling import check_logprobs

SIZES = ((300, 150, -1), (1, 300, -1), (67, 600, 20), (2, 152_000, -1))
"""Rows, vocabulary size, and number of alternatives with log-probabilities."""
HISTORY = 24
REPEATS = 20
"""How often a row's prompt repeats some tokens, so that it has hundreds."""
NUM_CALLS = 600
CALLS_VOCAB = 64
RANDOM = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
SCORE_OFF = 1e-4
"""How far a score may be below the best one because of rounding."""


def draw_settings(rows: int, vocab: int, logits: Tensor) -> dict[str, dict[str, Any]]:
    """Each setting by name, with the other settings that it needs.

    Every value changes the tokens of many rows. Penalties lift tokens in every second row, where
    the most frequent ones are not the best.
    """
    device = logits.device
    row_ids = torch.arange(rows, device=device)
    cycle = (row_ids % 5).float()
    base = {
        "temperature": 0.9 + cycle / 4,
        "seeds": row_ids * 7919 + 11,
        "positions": row_ids * 31 % 97,
    }
    best = logits.topk(min(HISTORY, vocab), -1).indices
    # Three times the best, twice the second one, and so on; tokens past the length do not count.
    repeats = torch.tensor([0, 0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8], device=device)
    is_lifted = row_ids[:, None] % 2 == 1
    answer = best.gather(1, torch.where(is_lifted, 8 - repeats, repeats))
    history = torch.cat([best[:, 12:].repeat(1, REPEATS), answer, best[:, 9:12]], 1)
    sign = torch.where(is_lifted[:, 0], -1.0, 1.0)
    past = {
        "history": history,
        "history_lens": torch.full_like(row_ids, history.shape[1] - 3),
        "prompt_lens": torch.full_like(row_ids, history.shape[1] - 15),
    }
    mask = torch.arange(-(-vocab // 32) * 4, device=device).mul(37).add(row_ids[:, None] * 11)
    return {
        "temperature": {**base, "temperature": 0.3 + cycle / 2},
        "top_k": {**base, "top_k": 1 + row_ids % 9},
        "top_p": {**base, "top_p": 0.02 + cycle / 12},
        "min_p": {**base, "min_p": 0.25 + cycle / 8},
        "repetition": {**past, "repetition": (1.5 + cycle / 2) ** sign},
        "presence": {**past, "presence": sign * (0.6 + cycle / 2)},
        "frequency": {**past, "frequency": sign * (0.5 + cycle / 4)},
        "bias": {"bias": noise(rows, vocab, dtype=torch.float32, device=str(device), seed=5)},
        "banned": {"banned": logits > logits.amax(-1, keepdim=True) - 0.5},
        "mask": {"mask": mask.to(torch.uint8).contiguous().view(torch.int32)},
    }


def list_samplings(rows: int, vocab: int, logits: Tensor) -> Iterator[tuple[str, Sampling]]:
    """A name and the settings: each alone, each with all of another kind, and all of them."""
    settings = draw_settings(rows, vocab, logits)
    random: dict[str, Any] = {
        name: value for each in RANDOM[:4] for name, value in settings[each].items()
    }
    random |= {name: settings[name][name] for name in RANDOM[:4]}
    rules: dict[str, Any] = {
        name: value
        for each, values in settings.items()
        if each not in RANDOM
        for name, value in values.items()
    }
    yield "no setting", Sampling()
    for name, values in settings.items():
        yield name, Sampling(**values)
    others: Mapping[str, Any] = settings["temperature"]
    for name in (each for each in settings if each not in RANDOM):
        yield f"{name} beside a temperature", Sampling(**others, **settings[name])
    for name in RANDOM[:4]:
        yield f"{name} beside penalties and bans", Sampling(**{**rules, **settings[name]})
    yield "every setting", Sampling(**{**random, **rules})
    warm = Sampling(**settings["temperature"])
    # Rows that differ in only one of these get other tokens.
    row_ids = torch.arange(rows, device=logits.device)
    for name in ("seeds", "positions"):
        changed: dict[str, Any] = {name: row_ids * 5 + 1}
        alike = evolve(warm, seeds=torch.full_like(row_ids, 3), positions=torch.zeros_like(row_ids))
        yield f"{name} alone", evolve(alike, **changed)


def check_each_setting(ops: Ops, device: str, *, rows: int, vocab: int, top_logprobs: int) -> None:
    """Tokens are torch's under every setting, for any number of rows."""
    logits = noise(rows, vocab, dtype=torch.float32, device=device, scale=1.5)
    for name, sampling in list_samplings(rows, vocab, logits):
        text = f"{name}, {rows} rows of {vocab} tokens: "
        asked = evolve(sampling, top_logprobs=top_logprobs)
        expected = TorchOps().sample(logits.clone(), asked)
        compare_scored(ops.sample(logits.clone(), asked), expected, logits, asked, text)


def compare_scored(
    actual: Sample,
    expected: Sample,
    logits: Tensor,
    sampling: Sampling,
    text: str,
    allowed: float = SCORE_OFF,
) -> None:
    """Raise AssertionError if a sampled token has a lower score in torch."""
    assert torch.equal(actual.healthy, expected.healthy), f"{text}other rows are healthy"
    others = expected.healthy & (actual.tokens != expected.tokens)
    if bool(others.any()):
        scores = sampler.score_tokens(logits.clone(), sampling)
        ours, theirs = (
            scores.gather(1, sample.tokens[:, None])[:, 0] for sample in (actual, expected)
        )
        lower = others & ~(theirs - ours < allowed)
        assert not bool(lower.any()), (
            f"{text}tokens that torch rates lower, in {int(lower.sum())} rows, first in row "
            f"{int(lower.nonzero()[0])}"
        )
    try:
        check_logprobs(actual, expected, expected.healthy & ~others)
    except AssertionError as error:
        raise AssertionError(f"{text}log-probabilities: {str(error).split('.')[0]}") from error


def check_head(ops: Ops, device: str) -> None:
    """Scores and samples of one call are torch's under every setting."""
    rows, config = 67, make_plain()
    weights = draw_weights(config, torch.float32, device)
    hidden = noise(rows, config.hidden, dtype=torch.float32, device=device, scale=1.0)
    plain = TorchOps()
    for each in (plain, ops):
        each.bind(weights.prepare(each), config)
    with torch.inference_mode():
        logits = plain.lm_head(hidden)
        for name, sampling in list_samplings(rows, config.vocab, logits):
            expected = TorchOps().sample(logits.clone(), sampling)
            actual = ops.lm_head_sample(hidden, sampling)
            text = f"lm_head_sample with {name}: "
            compare_scored(actual, expected, logits, sampling, text, allowed=1e-3)


def check_many_calls(ops: Ops, device: str) -> None:
    """Hundreds of calls give the same results as the first ones."""
    rows, vocab = 3, CALLS_VOCAB
    logits = noise(rows, vocab, dtype=torch.float32, device=device, scale=1.5)
    samplings = [sampling for _, sampling in list_samplings(rows, vocab, logits)]
    first = [ops.sample(logits.clone(), sampling).tokens.tolist() for sampling in samplings]
    for number in range(NUM_CALLS):
        which = number % len(samplings)
        tokens = ops.sample(logits.clone(), samplings[which]).tokens.tolist()
        assert tokens == first[which], (
            f"call {number + 1 + len(samplings)} of sample gives {tokens}, and the same call "
            f"gave {first[which]} before"
        )
