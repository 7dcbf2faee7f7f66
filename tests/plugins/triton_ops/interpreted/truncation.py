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
from headstock_triton.sampling.candidates import WHOLE
from headstock_triton.sampling.sampler import fused_sample
from headstock_triton.sampling.truncation import find_cut

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


def spread_row(vocab: int, kind: str) -> torch.Tensor:
    """A row whose candidates are few, or more than fit."""
    noise = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab))
    if kind == "flat":
        return noise
    if kind == "equal":
        return torch.zeros(vocab)
    row = noise * 2
    row[::101] += 12
    row[7::211] = 15.5  # as good as each other
    if kind == "forbidden":
        row[3:-5] = -math.inf
    return row


KINDS = ("peaked", "flat", "equal", "forbidden")
LIMITS = (
    {"top_p": 0.9},
    {"top_k": 20, "top_p": 0.9},
    {"top_k": 20},
    {"min_p": 0.05},
    {"min_p": 0.05, "top_p": 0.9},
    {"top_k": 3, "min_p": 0.9},
    {"top_k": 1},
    {"top_k": 5000},
    {"top_p": 1e-9},
)


@pytest.mark.parametrize("limits", often(2, LIMITS))
@pytest.mark.parametrize("vocab", often(1, [4099, 37, 1000]))
def test_rows_with_few_candidates_are_not_searched(limits: dict[str, float], vocab: int) -> None:
    logits = torch.stack([spread_row(vocab, kind) for kind in KINDS])
    asked = cases.sampling_of(4, "cpu", {"temperature": 0.8, **limits})
    asked.temperature.fill_(0.8)

    cases.compare_cut(logits, asked)
    cut = find_cut(logits, asked)

    assert cut is not None
    is_decided = [bool(pick != WHOLE.value) for pick in cut.picks]
    if vocab == 4099 and limits == {"top_p": 0.9}:
        assert is_decided == [True, False, False, True]
    if vocab == 37 and "top_k" not in limits:
        assert all(is_decided)
    whole = fused_sample(logits, asked).tokens
    for row, pick in enumerate(cut.picks.tolist()):
        alone = fused_sample(logits[row : row + 1], take(asked, row)).tokens
        assert whole[row] == alone[0]
        assert not is_decided[row] or whole[row] == pick


def take(asked: Sampling, row: int) -> Sampling:
    """The settings of one row."""
    return asked.take(torch.tensor([row]))


def test_rows_ask_for_different_things() -> None:
    logits = torch.stack([spread_row(1000, "peaked")] * 5 + [spread_row(1000, "flat")])
    logits[4, 8] = math.nan
    asked = Sampling(
        temperature=torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 1.0]),
        top_k=torch.tensor([1000, 5, 1000, 5, 5, 1000]),
        top_p=torch.tensor([1.0, 1.0, 0.5, 0.5, 0.5, 0.99]),
        seeds=torch.arange(6),
        positions=torch.arange(6),
    )

    cases.compare_cut(logits, asked)
    cut = find_cut(logits, asked)

    assert cut is not None
    is_left = [bool(pick == WHOLE.value) for pick in cut.picks]
    assert is_left == [True, False, False, True, True, True]
    sample = fused_sample(logits, asked)
    assert sample.healthy.tolist() == [True, True, True, True, False, True]
    assert sample.tokens[3] == logits[3].argmax()


def test_where_float32_leaves_an_edge_open_the_mass_is_summed_again() -> None:
    logits = torch.zeros(2, 4096)
    logits[:, :1024:128] = torch.arange(1.0, 9.0)
    # As near to what the best four weigh, of all, as float32 sums of the rest cannot tell.
    weights = logits[0].double().exp()
    share = float((weights.sort(descending=True).values[:4].sum() / weights.sum()).float())
    top_p = torch.tensor([share, share]).nextafter(torch.tensor([0.0, 1.0]))

    cases.compare_cut(logits, Sampling(temperature=torch.ones(2), top_p=top_p))


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
