"""Sampling against torch's: tokens, what is cut off, noise, log-probabilities, and the distribution."""

from __future__ import annotations

import math

import pytest
import sampling_cases as cases
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import SETTINGS

from headstock.nn.noise import gumbel, random_words
from headstock.nn.truncation import keep_top
from headstock.spi import Sampling
from headstock_triton import noise
from headstock_triton.sampling import sample

# numpy, which interprets, warns of what is meant: infinity less infinity in rows that are not sound.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero) encountered:RuntimeWarning")

TYPES = (torch.bfloat16, torch.float32)
TIED = st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 2.0]), min_size=13, max_size=13)
ROW = st.one_of(st.lists(st.floats(-8, 8, width=32), min_size=13, max_size=13), TIED)


@triton.jit
def noise_kernel(seeds, positions, words, values, vocab, BLOCK: tl.constexpr):
    row, start = tl.program_id(0), tl.program_id(1) * BLOCK
    at = start + tl.arange(0, BLOCK)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    tl.store(words + row * vocab + at, noise.random_words(seed, position, start, BLOCK).to(tl.int64), at < vocab)
    tl.store(values + row * vocab + at, noise.gumbel(seed, position, start, BLOCK), at < vocab)


def test_noise_is_torchs_word_for_word() -> None:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF])
    positions = torch.tensor([0, 1, 7, 40_959, 2**31, 2**32 - 1])
    words = torch.empty(6, 1000, dtype=torch.int64)
    values = torch.empty(6, 1000)

    noise_kernel[(6, 4)](seeds, positions, words, values, 1000, BLOCK=256)

    assert torch.equal(words, random_words(seeds, positions, 1000))
    torch.testing.assert_close(values, gumbel(seeds, positions, 1000), atol=2e-7, rtol=1e-6)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("vocab", [5, 37, 1000, 4099])
@pytest.mark.parametrize("asked", SETTINGS)
def test_tokens_are_torchs(asked: str, vocab: int, dtype: torch.dtype) -> None:
    for rows in (1, 9):  # those of few rows are sorted
        assert cases.sampling_case(rows, vocab, dtype, "cpu", SETTINGS[asked]) == 0


def test_more_rows_are_shared_out_otherwise() -> None:
    assert cases.sampling_case(17, 5000, torch.bfloat16, "cpu", SETTINGS["temperature"]) == 0


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e-3, 50.0])
def test_cold_and_hot_rows(temperature: float) -> None:
    assert cases.sampling_case(7, 300, torch.bfloat16, "cpu", {"temperature": temperature}) == 0
    assert cases.sampling_case(9, 300, torch.bfloat16, "cpu", {"temperature": temperature, "top_p": 0.7}) == 0


@pytest.mark.parametrize("asked", ["greedy", "temperature", "all"])
@pytest.mark.parametrize("alternatives", [0, 3])
def test_log_probabilities(asked: str, alternatives: int) -> None:
    targets = torch.tensor([-1, 5, -1, 0, 2, 3, -1])
    for each in (None, targets):
        cases.sampling_case(7, 300, torch.bfloat16, "cpu", SETTINGS[asked], top_logprobs=alternatives, targets=each)


def test_penalties_bans_and_bias() -> None:
    rows, vocab = 7, 300
    history = (torch.arange(rows * 20).view(rows, 20) * 31) % vocab
    rules = {
        "repetition": torch.full((rows,), 1.3),
        "presence": torch.full((rows,), 0.5),
        "frequency": torch.full((rows,), 0.2),
        "history": history,
        "history_lens": torch.full((rows,), 18),
        "prompt_lens": torch.full((rows,), 4),
        "banned": torch.arange(vocab).expand(rows, -1) % 3 == 0,
        "bias": cases.noise(rows, vocab, dtype=torch.float32, device="cpu", seed=9),
        "top_logprobs": 2,
    }
    for asked in ("greedy", "temperature", "all"):
        assert cases.sampling_case(rows, vocab, torch.float32, "cpu", SETTINGS[asked], **rules) == 0


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(ROW, st.integers(1, 13), st.floats(0, 1, width=32)), min_size=1, max_size=3),
    st.sampled_from([None, 1e-3, 0.2, 1.0]),
)
def test_what_stays_is_what_torch_keeps(rows: list[tuple[list[float], int, float]], min_p: float | None) -> None:
    logits, ones = torch.tensor([row for row, _, _ in rows]), torch.ones(len(rows))
    top_k, top_p = torch.tensor([k for _, k, _ in rows]), torch.tensor([p for _, _, p in rows])
    floor = None if min_p is None else ones * min_p
    for k, p in ((top_k, None), (None, top_p), (top_k, top_p)):
        # At the very edge the last bit of a sum decides, and sums are taken in another order.
        near = (Sampling(temperature=ones, top_k=k, top_p=each, min_p=floor) for each in around(p))
        assert any(compare(logits, asked) for asked in near)


def around(top_p: torch.Tensor | None) -> list[torch.Tensor | None]:
    """The same, and as near to it as float32 has another number."""
    if top_p is None:
        return [None]
    return [top_p, top_p.nextafter(torch.ones(())), top_p.nextafter(torch.zeros(()))]


def compare(logits: torch.Tensor, asked: Sampling) -> bool:
    """Whether the same tokens stay."""
    try:
        cases.compare_cut(logits, asked)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("asked", ["top_k", "top_p", "min_p", "all"])
def test_what_stays_of_larger_rows(asked: str, dtype: torch.dtype) -> None:
    assert 0 < cases.cut_case(7, 3000, dtype, "cpu", SETTINGS[asked]) < 1


def test_outliers_and_one_value_alone() -> None:
    logits = torch.zeros(4, 50)
    logits[0, 7], logits[1, 9], logits[2, 3:] = 1e30, -1e30, -math.inf
    for change in ({"top_k": torch.full((4,), 5)}, {"top_p": torch.full((4,), 0.5)}):
        cases.compare_cut(logits, Sampling(temperature=torch.ones(4), **change))


def test_the_distribution_is_that_of_the_softmax() -> None:
    draws, logits = 150, torch.tensor([1.0, -1.0, 0.5, 0.0, 2.0, 1.5])
    asked = Sampling(
        temperature=torch.full((draws,), 0.8),
        top_k=torch.full((draws,), 5),
        top_p=torch.full((draws,), 0.9),
        seeds=torch.arange(draws),
        positions=torch.arange(draws) * 3,
    )

    tokens = sample(logits.repeat(draws, 1), asked).tokens

    expected = keep_top(logits[None] / 0.8, asked.top_k[:1], asked.top_p[:1])[0].softmax(-1) * draws
    likely, counts = expected > 0, tokens.bincount(minlength=6).float()
    assert likely.tolist() == [True, False, True, False, True, True]
    assert counts[~likely].sum() == 0
    assert ((counts - expected)[likely] ** 2 / expected[likely]).sum() < 16.3  # of 3 degrees of freedom: 1 in 1000


def test_no_rows() -> None:
    found = sample(torch.empty(0, 20), Sampling(top_logprobs=0))
    assert found.tokens.shape == found.healthy.shape == found.logprobs.shape == (0,)
    assert found.tokens.dtype == torch.int64 and found.healthy.dtype == torch.bool
