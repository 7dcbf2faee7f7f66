"""Philox against its authors' vectors and against a second implementation; the noise's
distribution.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headstock.nn.noise import gumbel, philox, random_words

WORD = st.integers(0, 2**32 - 1)

KNOWN = (
    # counter, key, answer: philox4x32-10 in kat_vectors of Random123
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
)


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def python_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 word by word, with Python's unbounded integers."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (right >> 32) ^ b ^ k, right % 2**32, (left >> 32) ^ d ^ m, left % 2**32
        k, m = (k + 0x9E3779B9) % 2**32, (m + 0xBB67AE85) % 2**32
    return [a, b, c, d]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter: str, key: str, answer: str) -> None:
    found = philox(torch.tensor(words(counter)), torch.tensor(words(key)))

    assert found.tolist() == words(answer)
    assert python_philox(words(counter), words(key)) == words(answer)


@given(st.lists(WORD, min_size=4, max_size=4), st.lists(WORD, min_size=2, max_size=2))
def test_any_counter_and_key(counter: list[int], key: list[int]) -> None:
    assert philox(torch.tensor(counter), torch.tensor(key)).tolist() == python_philox(counter, key)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31), st.integers(1, 11))
def test_words_of_a_row(seed: int, position: int, vocab: int) -> None:
    found = random_words(torch.tensor([seed, 3]), torch.tensor([position, 7]), vocab)

    key = [seed % 2**32, (seed >> 32) % 2**32]
    expected = [
        python_philox([token >> 2, position, 0, 0], key)[token & 3] for token in range(vocab)
    ]
    assert found[0].tolist() == expected


def test_gumbel_is_finite_and_has_the_right_moments() -> None:
    noise = gumbel(torch.arange(40), torch.arange(40) * 1000, 25_000).double()

    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.57722, abs=0.005)  # Euler's constant
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.01)


def test_gumbel_reaches_far_into_its_tail() -> None:
    """Among 16 million values one beyond 15 is expected five times; 24-bit uniforms near 1 would
    quantize it.
    """
    noise = gumbel(torch.arange(160), torch.zeros(160, dtype=torch.int64), 100_000)

    assert noise.max() > 14
    assert len(noise[noise > 12].unique()) == (noise > 12).sum()
