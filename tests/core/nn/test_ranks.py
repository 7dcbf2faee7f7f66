"""The rank of each reported token, whatever operations sample it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headstock.nn.eager_step import score_and_sample
from headstock.nn.sampler import sample
from headstock.ops.torch_ops import TorchOps
from headstock.spi import Program, Sample, Sampling

VOCAB = 37


@given(
    scores=st.lists(st.integers(-9, 9), min_size=VOCAB, max_size=VOCAB),
    target=st.integers(-1, VOCAB - 1),
    most=st.integers(0, 5),
    temperature=st.sampled_from([0.0, 1.0, 30.0]),
)
def test_a_rank_counts_the_tokens_that_are_as_likely(
    scores: list[int], target: int, most: int, temperature: float
) -> None:
    found = sample(
        torch.tensor([scores, scores[::-1]], dtype=torch.float32),
        Sampling(
            targets=torch.tensor([target, -1]),
            top_logprobs=most,
            temperature=torch.full((2,), temperature),
            seeds=torch.tensor([5, 6]),
            positions=torch.tensor([7, 8]),
        ),
    )
    assert found.ranks is not None and found.top_ids is not None
    for row, likely in enumerate((scores, scores[::-1])):
        token = int(found.tokens[row]) if row or target < 0 else target
        rank = sum(score >= likely[token] for score in likely)
        assert int(found.ranks[row]) == rank
        assert token in found.top_ids[row].tolist() or rank > most


class WithoutRanks(TorchOps):
    """Operations of before there were ranks; they write to the logits that they sample from."""

    def lm_head(self, hidden: Tensor) -> Tensor:
        return hidden.clone()

    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        found = evolve(super().sample(logits, sampling), ranks=None)
        logits.fill_(0.0)
        return found


@pytest.mark.parametrize("has_own_scores", [True, False])
@pytest.mark.parametrize("max_logits", [2, 9])
def test_operations_without_ranks_get_the_true_ones(has_own_scores: bool, max_logits: int) -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(3))
    settings = Sampling(
        targets=torch.tensor([-1, 4, 0, -1, 36]),
        top_logprobs=2,
        bias=torch.arange(VOCAB).expand(5, -1).float(),
    )
    ops = WithoutRanks()
    own = (lambda params, config, hidden, ops: hidden.clone()) if has_own_scores else None
    program = SimpleNamespace(
        ops=ops,
        model=SimpleNamespace(logits=own),
        params={},
        config=None,
        max_logits=max_logits,
    )
    found = score_and_sample(cast("Program", program), logits, settings)
    expected = sample(logits.clone(), settings)
    assert found.ranks is not None and expected.ranks is not None
    assert found.ranks.tolist() == expected.ranks.tolist()
    assert max(found.ranks.tolist()) > 2
    none = score_and_sample(cast("Program", program), logits, Sampling())
    assert none.logprobs is None and none.ranks is None
