"""Sampling against definitions written out token by token, and its independence of neighbours."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from often import count_examples
from torch import Tensor

from headstock.nn.sampler import sample
from headstock.nn.truncation import apply_min_p, apply_top_k_top_p
from headstock.spi import Sample, Sampling

VOCAB = 13
SCORE = st.floats(-8, 8, width=32)
ROW = st.lists(st.one_of(SCORE, st.sampled_from([-1.0, 0.0, 2.0])), min_size=VOCAB, max_size=VOCAB)


def softmax(row: list[float] | np.ndarray) -> np.ndarray:
    weights = np.exp(np.asarray(row, np.float64) - np.max(row))
    return weights / weights.sum()


def brute_top(row: list[float], top_k: int, top_p: float) -> set[int]:
    """The tokens that stay, taken best first until there are `top_k`, or until those before reach
    `top_p`.
    """
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))[:top_k]
    probabilities = softmax([row[token] for token in order])
    kept: set[int] = set()
    before = 0.0
    for token, probability in zip(order, probabilities, strict=True):
        if before >= top_p and top_p < 1:
            break
        kept.add(token)
        before += probability
    return kept


def kept(scores: Tensor) -> list[set[int]]:
    return [set(row.isfinite().nonzero().flatten().tolist()) for row in scores]


def draw(logits: Tensor, **asked: Any) -> Sample:
    return sample(logits.clone(), Sampling(**asked))


@pytest.mark.feature("H13")
@settings(max_examples=count_examples(200))
@given(
    st.lists(
        st.tuples(ROW, st.integers(1, VOCAB), st.floats(1 / 64, 1, width=32)),
        min_size=1,
        max_size=4,
    )
)
def test_nucleus_equals_brute_force(rows: list[tuple[list[float], int, float]]) -> None:
    logits, top_k, top_p = (
        torch.tensor([r for r, _, _ in rows]),
        [k for _, k, _ in rows],
        [p for _, _, p in rows],
    )

    found = apply_top_k_top_p(logits, torch.tensor(top_k), torch.tensor(top_p))

    expected = [brute_top(row, k, p) for row, k, p in rows]
    near = [brute_top(row, k, p * (1 + d)) for row, k, p in rows for d in (-1e-9, 1e-9)]
    # At the very edge the last bit of a sum decides: what a billionth more or less of top_p would
    # give is right too.
    for index, tokens in enumerate(kept(found)):
        assert tokens in (expected[index], *near[2 * index : 2 * index + 2])
        assert found[index][list(tokens)].tolist() == logits[index][list(tokens)].tolist()


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000])
def test_a_mask_bans_the_tokens_whose_bit_is_not_set(vocab: int) -> None:
    allowed = np.random.default_rng(vocab).random((3, vocab)) < 0.4
    allowed[0] = True
    words = -(-vocab // 32)
    bits = np.ones((3, words * 32), bool)  # those past the vocabulary mean nothing
    bits[:, :vocab] = allowed
    mask = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=(3, vocab))).float()

    found = draw(logits, mask=mask, top_logprobs=0)

    wanted = np.where(allowed, logits.numpy(), -np.inf)
    healthy = allowed.any(1)
    assert found.healthy.tolist() == healthy.tolist()
    assert found.tokens.numpy()[healthy].tolist() == wanted.argmax(1)[healthy].tolist()
    # The model's own, before the mask.
    assert found.logprobs is not None
    likely = logits.log_softmax(-1).gather(1, found.tokens[:, None])[:, 0]
    assert torch.equal(found.logprobs, likely)


@given(ROW, st.integers(1, VOCAB), st.floats(1 / 64, 1, width=32))
def test_top_k_and_top_p_alone(row: list[float], top_k: int, top_p: float) -> None:
    logits = torch.tensor([row])

    assert kept(apply_top_k_top_p(logits, torch.tensor([top_k]), None)) == [
        brute_top(row, top_k, 1.0)
    ]
    assert kept(apply_top_k_top_p(logits, None, torch.tensor([1.0]))) == [set(range(VOCAB))]
    assert len(kept(apply_top_k_top_p(logits, None, torch.tensor([top_p])))[0]) >= 1


@given(ROW, st.sampled_from([0.0, 0.01, 0.3, 1.0]))
def test_min_p_keeps_what_is_likely_enough(row: list[float], min_p: float) -> None:
    found = kept(apply_min_p(torch.tensor([row]), torch.tensor([min_p])))[0]

    assert row.index(max(row)) in found
    ratios = softmax(row) / softmax(row).max()
    assert {t for t in range(VOCAB) if ratios[t] > min_p * 1.0001} <= found
    assert found <= {t for t in range(VOCAB) if ratios[t] >= min_p * 0.9999}


def drawn_tokens(probabilities: list[float], **asked: float) -> set[int]:
    """The tokens that 3,000 draws give from logits with these probabilities at temperature 1."""
    draws = 3_000
    each = {
        name: torch.full((draws,), value) for name, value in ({"temperature": 1.0} | asked).items()
    }
    logits = torch.tensor(probabilities, dtype=torch.float64).log().float().expand(draws, -1)
    drawn = draw(logits, **each, seeds=torch.full((draws,), 7), positions=torch.arange(draws))
    return set(drawn.tokens.tolist())


def test_min_p_cuts_first_and_top_p_counts_what_it_leaves() -> None:
    # Of 0.5, 0.2 and 0.15 the first two are 82 %; of all tokens they are 70 %.
    assert drawn_tokens([0.5, 0.2, 0.15, 0.1, 0.05], min_p=0.25, top_p=0.8) == {0, 1}, (
        "min-p comes before top-p"
    )
    assert drawn_tokens([0.5, 0.2, 0.15, 0.1, 0.05], top_p=0.8) == {0, 1, 2}, (
        "min-p comes before top-p"
    )


def test_temperature_comes_before_what_cuts() -> None:
    probabilities = [0.64, 0.16, 0.12, 0.08]  # at temperature 2: 0.44, 0.22, 0.19, 0.16

    assert drawn_tokens(probabilities, top_p=0.75) == {0, 1}, "temperature first"
    assert drawn_tokens(probabilities, top_p=0.75, temperature=2.0) == {0, 1, 2}, (
        "temperature first"
    )
    assert drawn_tokens(probabilities, min_p=0.3) == {0}, "temperature first"
    assert drawn_tokens(probabilities, min_p=0.3, temperature=2.0) == {0, 1, 2, 3}, (
        "temperature first"
    )


def test_a_sum_that_is_top_p_exactly_is_enough_and_of_equals_the_lower_id_stays() -> None:
    assert drawn_tokens([0.25, 0.25, 0.25, 0.25], top_p=0.5) == {0, 1}, "a tie"
    assert drawn_tokens([0.0, 0.25, 0.25, 0.0, 0.25, 0.25], top_p=0.75) == {1, 2, 4}, "a tie"
    assert drawn_tokens([0.5, 0.5], top_p=0.5) == {0}, "a tie"


def test_min_p_of_1_keeps_the_likeliest_and_its_equals() -> None:
    assert drawn_tokens([0.2, 0.5, 0.3], min_p=1.0) == {1}, "min-p of 1"
    assert drawn_tokens([0.4, 0.2, 0.4], min_p=1.0) == {0, 2}, "min-p of 1"


@given(ROW, st.data())
def test_penalties_as_defined(row: list[float], data: st.DataObject) -> None:
    history = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=8))
    prompt = data.draw(st.integers(0, len(history)))
    repetition, presence, frequency = 1.7, 0.6, 0.25
    expected = list(row)
    for token in set(history):
        expected[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    for token in range(VOCAB):
        count = history[prompt:].count(token)
        expected[token] -= frequency * count + presence * (count > 0)
    logits = torch.tensor([row])
    padded = torch.full((1, 9), -7)  # what lies past the end is never read
    padded[0, : len(history)] = torch.tensor(history)

    sample(
        logits,
        Sampling(
            repetition=torch.tensor([repetition]),
            presence=torch.tensor([presence]),
            frequency=torch.tensor([frequency]),
            history=padded,
            history_lens=torch.tensor([len(history)]),
            prompt_lens=torch.tensor([prompt]),
        ),
    )

    np.testing.assert_allclose(logits[0].numpy(), expected, rtol=1e-5, atol=1e-5)


@given(
    st.lists(
        st.tuples(ROW, st.sampled_from([0.0, 0.5, 1.3]), st.integers(0, 2**62)),
        min_size=2,
        max_size=5,
    ),
    st.data(),
)
def test_a_row_does_not_depend_on_its_neighbours(
    rows: list[tuple[list[float], float, int]], data: st.DataObject
) -> None:
    logits = torch.tensor([row for row, _, _ in rows])
    n = len(rows)
    asked = {
        "temperature": torch.tensor([t for _, t, _ in rows]),
        "seeds": torch.tensor([seed for _, _, seed in rows]),
        "positions": torch.arange(n) * 3,
        "top_k": torch.tensor([data.draw(st.integers(1, VOCAB)) for _ in rows]),
        "top_p": torch.tensor([data.draw(st.floats(0.1, 1)) for _ in rows]),
        "min_p": torch.tensor([data.draw(st.sampled_from([0.0, 0.1])) for _ in rows]),
    }
    order = torch.tensor(data.draw(st.permutations(range(n))))

    together = draw(logits, **asked).tokens
    shuffled = draw(logits[order], **{name: value[order] for name, value in asked.items()}).tokens
    alone = [
        draw(logits[i : i + 1], **{name: v[i : i + 1] for name, v in asked.items()}).tokens[0]
        for i in range(n)
    ]

    assert shuffled.tolist() == together[order].tolist()
    assert alone == together.tolist()


@given(ROW)
def test_temperature_zero_is_greedy_beside_warm_rows(row: list[float]) -> None:
    logits = torch.tensor([row, row])

    mixed = draw(
        logits,
        temperature=torch.tensor([0.0, 1.0]),
        seeds=torch.tensor([1, 2]),
        positions=torch.tensor([0, 0]),
    )

    assert mixed.tokens[0] == draw(logits).tokens[0] == int(np.argmax(row))


def test_frequencies_follow_the_distribution() -> None:
    """20,000 draws over positions: chi-squared with 4 degrees of freedom stays below its 99.9 %
    point.
    """
    row, temperature, draws = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5]), 0.8, 20_000
    result = draw(
        row.expand(draws, -1),
        temperature=torch.full((draws,), temperature),
        seeds=torch.full((draws,), 12345),
        positions=torch.arange(draws),
    )

    expected = draws * softmax(row.numpy() / temperature)
    counts = np.bincount(result.tokens.numpy(), minlength=5)
    assert ((counts - expected) ** 2 / expected).sum() < 18.47


def test_banned_and_biased_tokens() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    banned = torch.tensor([[True, False, False], [False, False, False]])
    bias = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 5.0]])

    assert draw(logits, banned=banned).tokens.tolist() == [1, 0]
    assert draw(logits, bias=bias).tokens.tolist() == [0, 2]


def test_logprobs_are_of_the_raw_scores() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5], [1.0, 2.0, 0.5]])
    raw = logits.log_softmax(-1)

    result = draw(
        logits,
        bias=torch.tensor([[9.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
        targets=torch.tensor([-1, 2]),
        top_logprobs=2,
    )

    assert result.tokens.tolist() == [0, 1]
    torch.testing.assert_close(result.logprobs, torch.stack([raw[0, 0], raw[1, 2]]))
    assert result.top_ids is not None
    assert result.top_ids.tolist() == [[1, 0], [1, 0]]
    torch.testing.assert_close(result.top_logprobs, raw[:, [1, 0]])


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, "all"])
def test_an_unhealthy_row_is_told_and_leaves_others_alone(bad: float | str, warm: bool) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    asked: dict[str, Any] = {}
    if warm:
        asked = {
            "temperature": torch.tensor([0.0, 0.7, 0.7]),
            "seeds": torch.arange(3),
            "positions": torch.arange(3),
            "top_k": torch.full((3,), 5),
            "top_p": torch.full((3,), 0.9),
            "min_p": torch.full((3,), 0.05),
        }
    good = draw(logits, **asked)
    logits[1] = (
        -math.inf if bad == "all" else logits[1].index_fill(0, torch.tensor([4]), float(bad))
    )

    result = draw(logits, **asked)

    assert result.healthy.tolist() == [True, False, True]
    assert result.tokens[[0, 2]].tolist() == good.tokens[[0, 2]].tolist()
    assert 0 <= result.tokens[1] < VOCAB


def test_tiny_temperatures_do_not_overflow() -> None:
    logits = torch.tensor([[80.0, 79.0, -80.0]])

    result = draw(
        logits,
        temperature=torch.tensor([1e-38]),
        seeds=torch.tensor([1]),
        positions=torch.tensor([0]),
    )

    assert result.tokens.tolist() == [0]
    assert result.healthy.tolist() == [True]
