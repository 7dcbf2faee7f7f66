"""The gated convolution of `triton` against torch's, however steps cut the sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from attrs import evolve
from delta_rule_cases import make_delta_batch
from often import often
from torch import Tensor
from torch.nn.functional import silu

from headstock.nn.short_conv import ConvInputs, convolve_
from headstock_triton.conv import BLOCK, MANY_TOKENS, convolve_gated_, convolve_silu_

STEPS: Sequence[Sequence[tuple[int, int]]] = (
    [(0, 5), (0, 1), (0, 0)],
    [(5, 6), (1, 2), (0, 1)],
    [(6, 6), (2, 5), (1, 3)],
    [(6, 13), (5, 6), (0, 2)],
)
"""Intervals of positions of three rows, step by step; the last one begins again."""
PAGES = (4, 2, 7)


def written_out(
    projected: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, inputs: ConvInputs
) -> Tensor:
    """The same, an operation after the other."""
    before, after, inner = projected.chunk(3, -1)
    return convolve_(before * inner, weight, bias, state, inputs) * after


@pytest.mark.parametrize("dtype", often(1, [torch.bfloat16, torch.float16, torch.float32]))
@pytest.mark.parametrize(
    ("taps", "width", "has_bias"),
    often(1, [(3, 24, True), (4, BLOCK + 8, False), (2, 24, False)]),
)
def test_states_and_results_are_torch_s(
    dtype: torch.dtype, taps: int, width: int, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(taps)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    weight, bias = noise(taps, width), noise(width) if has_bias else None
    # Another layer's state lies between two pages, as it does in a pool.
    pool = torch.full((9, 2, taps - 1, width), math.nan, dtype=dtype)
    state, expected = pool[:, 1], pool[:, 1].clone()
    for step, spans in enumerate(STEPS):
        batch = make_delta_batch(spans, 2 * (step == 2), PAGES)
        inputs = ConvInputs.of(batch, 0, taps)
        # Rows of one token each go another way.
        assert (inputs.sources is None) == (step == 1)
        projected = noise(len(batch.tokens), 3 * width)

        found = convolve_gated_(projected, weight, bias, state, inputs)

        wanted = written_out(projected, weight, bias, expected, inputs)
        rows = int(batch.query_start[-1])
        assert found[:rows].isfinite().all()
        tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(found[:rows], wanted[:rows], atol=tolerance, rtol=tolerance)
        used = [4, 2, 7]
        assert torch.equal(state[used], expected[used]), "states are copies of inputs"
    assert pool[:, 0].isnan().all() and pool[[0, 1, 3, 5, 6, 8]].isnan().all()


@pytest.mark.parametrize(
    ("spans", "padding"),
    [([(0, MANY_TOKENS), (4, 5), (9, 12)], 20), ([(3, 9), (4, 5), (9, 12)], 0), ([(7, 12)], 0)],
)
def test_prompts_beside_other_rows_and_alone(
    spans: Sequence[tuple[int, int]], padding: int
) -> None:
    batch = make_delta_batch(spans, padding, PAGES)
    batch = evolve(batch, state_pages=(torch.tensor([4, 2, 7][: len(spans)]),))
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x, weight, state = noise(len(batch.tokens), 24), noise(4, 24), noise(9, 3, 24)
    expected, inputs = state.clone(), ConvInputs.of(batch, 0, 4)

    found = convolve_silu_(x, weight, None, state, inputs)

    torch.testing.assert_close(found, silu(convolve_(x, weight, None, expected, inputs)))
    assert torch.equal(state, expected)


def test_states_behind_drafts_are_torch_s() -> None:
    batch = make_delta_batch([(2, 5), (0, 2), (9, 10)], 1, PAGES)
    batch = evolve(
        batch,
        saved_tokens=torch.tensor([0, 1, 3, 5]),
        saved_pages=(torch.tensor([1, 3, 5, 6]),),
    )
    generator = torch.Generator().manual_seed(0)
    x, weight, state = (
        torch.randn(shape, generator=generator) for shape in ((7, 24), (4, 24), (9, 3, 24))
    )
    expected, inputs = state.clone(), ConvInputs.of(batch, 0, 4)

    found = convolve_silu_(x, weight, None, state, inputs)

    torch.testing.assert_close(found, silu(convolve_(x, weight, None, expected, inputs)))
    assert torch.equal(state, expected) and torch.equal(state[6], state[7])
    assert torch.equal(state[[0, 8]], expected[[0, 8]])


def test_a_step_without_tokens() -> None:
    batch = make_delta_batch([(0, 0)] * 3, 0, PAGES)
    nothing = torch.empty(0, 24)

    found = convolve_gated_(
        nothing, torch.ones(3, 8), None, torch.ones(9, 2, 8), ConvInputs.of(batch, 0, 3)
    )

    assert found.shape == (0, 8)
