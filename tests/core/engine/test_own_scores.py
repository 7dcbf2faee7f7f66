"""A family that scores by itself: its scores are what is sampled, in graphs and outside."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import toy_engine
import toy_plugins
from attrs import evolve
from often import often
from torch import Tensor
from toy_engine import EngineHarness, Toys, installed, random_requests, request

from headstock import SamplingParams
from headstock.spi import ModelConfig, Ops, Params
from headstock_conformance.scheduler.toy_device import VOCAB, next_token

DRAWS = 300


def score(params: Params, config: ModelConfig, hidden: Tensor, ops: Ops) -> Tensor:
    """The token behind the one that the operations would score best, each further one a third."""
    return -((torch.arange(VOCAB) - hidden - 1) % VOCAB) * math.log(3)


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Toys]:
    """The toy model with scores of its own, and what comes out of it then."""
    monkeypatch.setattr(toy_plugins, "TOY", evolve(toy_plugins.TOY, logits=score))
    monkeypatch.setattr(toy_engine, "next_token", lambda past: (next_token(past) + 1) % VOCAB)
    with installed(tmp_path) as folder:
        yield folder


@pytest.mark.parametrize("runner", often(1, ["rerun", "eager"]))
def test_greedy_tokens_are_the_best_of_its_scores(toys: Toys, runner: str) -> None:
    engine = toys.engine(runner=runner)
    harness = EngineHarness(engine).run(random_requests(np.random.default_rng(2), 30))

    assert set(harness.reasons.values()) == {"stop", "length"}
    engine.close()


@pytest.mark.parametrize("runner", often(1, ["rerun", "eager"]))
def test_draws_are_spread_as_its_scores_say(toys: Toys, runner: str) -> None:
    engine, prompt = toys.engine(runner=runner), [3, 1, 4, 1, 5]
    harness = EngineHarness(engine).run(
        request(str(seed), prompt, 2, params=SamplingParams(temperature=1.0, seed=seed))
        for seed in range(DRAWS)
    )

    # The second token follows a decode step, which is replayed.
    for at in range(2):
        places = Counter(
            (output[at] - next_token([*prompt, *output[:at]]) - 1) % VOCAB
            for output in harness.outputs.values()
        )
        # Two of three draws, within four deviations of a fair count.
        assert abs(places[0] - 2 / 3 * DRAWS) < 4 * math.sqrt(2 / 9 * DRAWS)
        assert abs(places[1] - 2 / 9 * DRAWS) < 4 * math.sqrt(14 / 81 * DRAWS)
    engine.close()
