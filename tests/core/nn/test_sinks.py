"""Attention sinks out of attention without them."""

from __future__ import annotations

import torch

from headstock.nn.attention.sinks import scale_by_sinks


def test_a_sink_far_above_the_scores_takes_all_and_one_far_below_nothing() -> None:
    out, lse = torch.ones(2, 3, 4), torch.full((2, 3), 5.0)

    scale_by_sinks(out, lse, torch.tensor([-200.0, 5.0, 200.0]))

    assert out[..., 0].tolist() == [[1.0, 0.5, 0.0]] * 2


def test_tokens_of_no_row_stay_as_they_are_whatever_their_sums() -> None:
    out, lse = torch.ones(4, 1, 2), torch.tensor([[0.0], [torch.nan], [torch.nan], [3.0]])

    scale_by_sinks(out, lse, torch.zeros(1), torch.tensor([0, 1, 1], dtype=torch.int32))

    assert out[:, 0, 0].tolist() == [0.5, 1.0, 1.0, 1.0]
