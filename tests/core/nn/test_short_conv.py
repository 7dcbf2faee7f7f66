"""The short convolution over states in pages: that of whole sequences, however steps cut them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from often import count_examples
from torch import Tensor

from headstock.nn.short_conv import ConvInputs, convolve_
from headstock.spi import Batch

WIDTH = 5
PAGES = 9


def make_batch(spans: Sequence[tuple[int, int]], pages: Sequence[int], padding: int = 0) -> Batch:
    """A step of rows at these intervals of positions, with so many tokens of no row behind them."""
    counts = torch.tensor([stop - start for start, stop in spans])
    positions = [torch.arange(*span) for span in spans]
    return Batch(
        tokens=torch.zeros(int(counts.sum()) + padding, dtype=torch.int64),
        positions=torch.cat([*positions, torch.zeros(padding, dtype=torch.int64)]),
        token_rows=torch.cat((torch.repeat_interleave(counts), torch.full((padding,), 99))),
        row_ids=torch.arange(len(spans)),
        starts=torch.tensor([start for start, _ in spans]),
        query_start=F.pad(counts.cumsum(0), (1, 0)).int(),
        max_query_len=int(counts.max()) + padding,
        slots=(),
        pools=(),
        logit_indices=None,
        state_pages=(None, torch.tensor(pages)),
    )


def run(batch: Batch, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> Tensor:
    return convolve_(x, weight, bias, state, ConvInputs.of(batch, 1, len(weight)))


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution of a whole sequence.   x, result: [tokens, width]"""
    padded = F.pad(x.t(), (len(weight) - 1, 0))[None]
    return F.conv1d(padded, weight.t()[:, None], bias, groups=x.shape[1])[0].t()


@st.composite
def schedules(draw: st.DrawFn) -> list[list[int]]:
    """Steps: how many tokens each of three rows computes, 0 for a row that sits out."""
    row = st.sampled_from([0, 1, 1, 1, 2, 3, 7])
    steps = st.lists(row, min_size=3, max_size=3).filter(any)
    return draw(st.lists(steps, min_size=1, max_size=8))


@settings(max_examples=count_examples(120))
@given(
    schedule=schedules(),
    taps=st.integers(2, 6),
    has_bias=st.booleans(),
    padding=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_steps_of_any_cut_compute_the_whole_sequences(
    schedule: list[list[int]], taps: int, has_bias: bool, padding: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(taps, WIDTH, generator=generator)
    bias = torch.randn(WIDTH, generator=generator) if has_bias else None
    totals = [sum(step[row] for step in schedule) for row in range(3)]
    inputs = [torch.randn(total, WIDTH, generator=generator) for total in totals]
    # What a page held before is another sequence's, and may be anything.
    state = torch.full((PAGES, taps - 1, WIDTH), math.nan)
    state[0] = 0
    pages = (1 + torch.randperm(PAGES - 1, generator=generator))[:3].tolist()
    done, outputs = [0, 0, 0], [torch.zeros(0, WIDTH)] * 3
    for step in schedule:
        rows = [row for row in range(3) if step[row]]
        spans = [(done[row], done[row] + step[row]) for row in rows]
        parts = [inputs[row][slice(*span)] for row, span in zip(rows, spans, strict=True)]
        batch = make_batch(spans, [pages[row] for row in rows], padding)
        x = torch.cat([*parts, torch.zeros(padding, WIDTH)])
        out = run(batch, x, weight, bias, state)
        assert out[len(x) - padding :].isfinite().all()
        sizes = [step[row] for row in rows] + [padding]
        for row, span, piece in zip(rows, spans, out.split(sizes), strict=False):
            outputs[row] = torch.cat((outputs[row], piece))
            done[row] = span[1]

    for row, x in enumerate(inputs):
        if len(x):
            torch.testing.assert_close(outputs[row], reference(x, weight, bias))
            # However it is cut, and whoever is beside it: the very bits.
            fresh = torch.full_like(state, math.nan)
            whole = run(make_batch([(0, len(x))], [3]), x, weight, bias, fresh)
            assert torch.equal(outputs[row], whole)
            assert torch.equal(state[pages[row]], fresh[3])
    untouched = [page for page in range(1, PAGES) if page not in pages]
    assert state[untouched].isnan().all()
    assert state[0].isfinite().all()


def test_states_behind_drafts_are_those_of_sequences_that_end_there() -> None:
    weight, x = torch.randn(4, WIDTH), torch.randn(9, WIDTH)
    state = torch.full((PAGES, 3, WIDTH), math.nan)
    run(make_batch([(0, 2), (0, 3)], [3, 4]), x[:5], weight, None, state)
    # Rows that verify two drafts and one, with less behind them than the state holds, and more.
    batch = make_batch([(2, 5), (3, 5)], [3, 4], 1)
    pages = (None, torch.tensor([5, 6, 7, 8]))
    drafted = evolve(batch, saved_tokens=torch.tensor([0, 1, 3, 4]), saved_pages=pages)
    before = state.clone()

    out = run(drafted, x[:6], weight, None, state)

    plain = before.clone()
    assert torch.equal(out, run(batch, x[:6], weight, None, plain))
    assert torch.equal(state[[3, 4]], plain[[3, 4]])
    for page, own, start, first, count in ((5, 3, 2, 0, 1), (6, 3, 2, 0, 2), (7, 4, 3, 3, 1)):
        alone = before.clone()
        part = make_batch([(start, start + count)], [own])
        run(part, x[first : first + count], weight, None, alone)
        assert torch.equal(state[page], alone[own])
    assert torch.equal(state[8], state[4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    x, weight = torch.randn(9, WIDTH).to(dtype), torch.randn(4, WIDTH).to(dtype)
    bias = torch.randn(WIDTH).to(dtype)
    state = torch.zeros(PAGES, 3, WIDTH, dtype=dtype)

    out = run(make_batch([(0, 9)], [1]), x, weight, bias, state)

    exact = reference(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(out, exact.to(dtype), atol=0, rtol=torch.finfo(dtype).eps)
    assert torch.equal(state[1], x[-3:])


def test_rows_that_pad_a_replay_leave_zeros_in_the_dummy_page() -> None:
    state = torch.full((PAGES, 2, WIDTH), 7.0)
    weight = torch.randn(3, WIDTH)
    for spans in ([(4, 5), (0, 1), (0, 1)], [(4, 6), (0, 0), (0, 0)]):
        state[0] = math.nan
        before = state[2:].clone()
        batch = make_batch(spans, [1, 0, 0], padding=2)
        # Replays give an upper bound.
        batch = evolve(batch, max_query_len=len(batch.tokens))
        x = torch.randn(len(batch.tokens), WIDTH)
        x[spans[0][1] - spans[0][0] :] = 0

        assert run(batch, x, weight, None, state).isfinite().all()
        assert (state[0] == 0).all() and torch.equal(state[2:], before)


def test_a_row_of_nan_stays_alone() -> None:
    state, weight = torch.zeros(PAGES, 2, WIDTH), torch.randn(3, WIDTH)
    x = torch.randn(5, WIDTH)
    x[2] = math.nan

    out = run(make_batch([(7, 9), (3, 4), (0, 2)], [1, 2, 3]), x, weight, None, state)
    assert out.isnan().any(1).tolist() == [False, False, True, False, False]
    out = run(
        make_batch([(9, 10), (4, 5), (2, 3)], [1, 2, 3]),
        x[3:].repeat(2, 1)[:3],
        weight,
        None,
        state,
    )
    assert out.isnan().any(1).tolist() == [False, True, False]
