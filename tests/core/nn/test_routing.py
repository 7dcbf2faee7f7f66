"""Which experts a token uses and how much each counts, worked out token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headstock.nn.moe import route
from headstock.spi import Experts, Scoring


def weigh(scores: Sequence[float], experts: Experts, bias: Sequence[float]) -> dict[int, float]:
    """The weight of each expert that the token uses."""
    if experts.scoring is Scoring.SIGMOID:
        probabilities = [1 / (1 + math.exp(-score)) for score in scores]
    else:
        total = sum(map(math.exp, scores))
        probabilities = [math.exp(score) / total for score in scores]
    values = probabilities
    if experts.choice_bias:
        values = [p + b for p, b in zip(probabilities, bias, strict=True)]
    size = experts.count // experts.groups
    parts = [range(first, first + size) for first in range(0, experts.count, size)]
    parts.sort(key=lambda part: -sum(sorted(values[e] for e in part)[-experts.group_best :]))
    allowed = [expert for part in parts[: experts.groups_per_token] for expert in part]
    chosen = sorted(allowed, key=lambda expert: -values[expert])[: experts.per_token]
    weights = {expert: probabilities[expert] for expert in chosen}
    if experts.renormalize:
        divisor = max(sum(weights.values()), experts.norm_floor)
        weights = {expert: weight / divisor for expert, weight in weights.items()}
    return {expert: weight * experts.scale for expert, weight in weights.items()}


def spread(count: int, seed: int) -> Tensor:
    """Numbers in random order, no two of them near to each other."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return (order - count / 2) * (4 / count) + 0.013 * order**1.5 / count


@given(data=st.data())
@settings(max_examples=60)
def test_weights_and_experts_are_those_of_each_token_by_itself(data: st.DataObject) -> None:
    groups, size = data.draw(st.sampled_from([(1, 7), (2, 3), (4, 2), (3, 5)]), "groups")
    groups_per_token = data.draw(st.integers(1, groups), "groups per token")
    experts = Experts(
        count=groups * size,
        per_token=data.draw(st.integers(1, groups_per_token * size), "per token"),
        intermediate=1,
        renormalize=data.draw(st.booleans(), "renormalize"),
        norm_floor=data.draw(st.sampled_from([0.0, 0.6]), "floor"),
        choice_bias=data.draw(st.booleans(), "bias"),
        scoring=data.draw(st.sampled_from(Scoring), "scoring"),
        groups=groups,
        groups_per_token=groups_per_token,
        group_best=data.draw(st.integers(1, min(2, size)), "best"),
        scale=data.draw(st.sampled_from([1.0, 2.5]), "scale"),
    )
    seed = data.draw(st.integers(0, 99), "seed")
    scores = torch.stack([spread(experts.count, seed + token) for token in range(4)])
    # Of both signs: below 0, chosen experts must still come before those of other groups.
    bias = spread(experts.count, seed + 7) * 0.7 - 0.4

    weights, ids = route(scores, experts, bias)

    for token, row in enumerate(scores.tolist()):
        wanted = weigh(row, experts, bias.tolist())
        found = dict(zip(ids[token].tolist(), weights[token].tolist(), strict=True))
        assert found == {expert: pytest.approx(weight, 1e-5) for expert, weight in wanted.items()}


def test_experts_are_weighed_without_the_bias_they_are_chosen_by() -> None:
    experts = Experts(
        count=4, per_token=1, intermediate=1, renormalize=False, scoring=Scoring.SIGMOID,
        choice_bias=True, groups=2, group_best=2,
    )  # fmt: skip
    scores, bias = torch.tensor([[3.0, -3.0, 1.0, 1.0]]), torch.tensor([0.0, 0.0, 5.0, 0.0])

    weights, ids = route(scores, experts, bias)
    assert ids.tolist() == [[2]] and weights.item() == pytest.approx(1 / (1 + math.exp(-1)))
    # the best expert of all is not in the group whose two best are better together
    weights, ids = route(scores, evolve(experts, choice_bias=False))
    assert ids.tolist() == [[2]] or ids.tolist() == [[3]]
    _, ids = route(scores, evolve(experts, choice_bias=False, group_best=1))
    assert ids.tolist() == [[0]]


def test_weights_of_impossible_experts_are_numbers() -> None:
    experts = Experts(
        count=2, per_token=2, intermediate=1, renormalize=True, scoring=Scoring.SIGMOID,
        norm_floor=1e-20,
    )  # fmt: skip
    weights, _ = route(torch.tensor([[-200.0, -300.0]]), experts)
    assert weights.tolist() == [[0.0, 0.0]]
