"""What sampling cuts off against what torch keeps, and the distribution of what is left."""

from __future__ import annotations

import math

import pytest
import sampling_cases as cases
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from often import often
from sampling_cases import SETTINGS

from headstock.nn.truncation import apply_top_k_top_p
from headstock.spi import Sampling
from headstock_triton.sampler import fused_sample

# numpy, which interprets, warns of what is meant: infinity less infinity in rows that are not
# sound.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(invalid value|divide by zero) encountered:RuntimeWarning"
)

TYPES = (torch.bfloat16, torch.float32)
TIED = st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 2.0]), min_size=13, max_size=13)
ROW = st.one_of(st.lists(st.floats(-8, 8, width=32), min_size=13, max_size=13), TIED)


@settings(max_examples=5)
@given(
    st.lists(st.tuples(ROW, st.integers(1, 13), st.floats(0, 1, width=32)), min_size=1, max_size=3),
    st.sampled_from([None, 1e-3, 0.2, 1.0]),
)
def test_what_stays_is_what_torch_keeps(
    rows: list[tuple[list[float], int, float]], min_p: float | None
) -> None:
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


@pytest.mark.parametrize("dtype", often(1, TYPES))
@pytest.mark.parametrize("asked", often(1, ["all", "top_k", "top_p", "min_p"]))
def test_what_stays_of_larger_rows(asked: str, dtype: torch.dtype) -> None:
    assert 0 < cases.cut_case(7, 3000, dtype, "cpu", SETTINGS[asked]) < 1


def test_outliers_and_one_value_alone() -> None:
    logits = torch.zeros(4, 50)
    logits[0, 7], logits[1, 9], logits[2, 3:] = 1e30, -1e30, -math.inf
    for change in ({"top_k": torch.full((4,), 5)}, {"top_p": torch.full((4,), 0.5)}):
        cases.compare_cut(logits, Sampling(temperature=torch.ones(4), **change))


@pytest.mark.parametrize("draws", often(0, [150]))
def test_the_distribution_is_that_of_the_softmax(draws: int) -> None:
    logits = torch.tensor([1.0, -1.0, 0.5, 0.0, 2.0, 1.5])
    asked = Sampling(
        temperature=torch.full((draws,), 0.8),
        top_k=torch.full((draws,), 5),
        top_p=torch.full((draws,), 0.9),
        seeds=torch.arange(draws),
        positions=torch.arange(draws) * 3,
    )

    tokens = fused_sample(logits.repeat(draws, 1), asked).tokens

    expected = (
        apply_top_k_top_p(logits[None] / 0.8, asked.top_k[:1], asked.top_p[:1])[0].softmax(-1)
        * draws
    )
    likely, counts = expected > 0, tokens.bincount(minlength=6).float()
    assert likely.tolist() == [True, False, True, False, True, True]
    assert counts[~likely].sum() == 0
    # of 3 degrees of freedom: 1 in 1000
    assert ((counts - expected)[likely] ** 2 / expected[likely]).sum() < 16.3
