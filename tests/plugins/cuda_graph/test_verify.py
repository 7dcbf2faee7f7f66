"""Replayed steps whose rows verify drafts: the same tokens, from the right graphs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from often import often
from toy_engine import EngineHarness, Toys, expected, random_requests, request

from headstock import SamplingParams
from headstock.engine.engine import Engine
from headstock.spi import Sample, Step
from headstock_cuda_graph.verify_graphs import VERIFY_TOKENS, verify_rows

RIGHT = ("guess.right=1.0", "guess.asked=1.0")


def watch(engine: Engine) -> Counter[str]:
    """Counts steps with several scored tokens a row by what a runner made of them."""
    runner: Any = getattr(engine.executor, "inner", engine.executor).runner
    counts: Counter[str] = Counter()
    whole, run = runner.replay_verification, runner.run

    def counted_whole(step: Step) -> Sample | None:
        sample: Sample | None = whole(step)
        counts["whole"] += sample is not None
        if sample is not None:
            assert len(sample.tokens) == len(step.row_ids) * runner.program.verify_len
        return sample

    def counted_run(step: Step) -> Sample:
        before = counts["whole"]
        sample: Sample = run(step)
        counts["eager"] += not sample.is_replayed
        counts["pieces"] += sample.is_replayed and counts["whole"] == before and bool(drafts(step))
        return sample

    def drafts(step: Step) -> int:
        return 0 if step.num_drafts is None else int(step.num_drafts.sum())

    runner.replay_verification, runner.run = counted_whole, counted_run
    return counts


@pytest.mark.feature("G2", "T6")
@pytest.mark.parametrize("attn", ["toy", "toy-uniform", "toy-planned", "toy,toy-planned"])
def test_steps_that_verify_are_replayed_whole_or_in_pieces_by_the_backend_of_prompts(
    toys: Toys, attn: str
) -> None:
    settings = {"proposer": "guess", "opt": RIGHT, "max_batch_tokens": 24, "overlap": False}
    engine = toys.engine(runner="rerun", attn=attn, max_running_requests=4, **settings)
    counts = watch(engine)
    harness = EngineHarness(engine)
    for i in range(4):
        harness.submit(request(str(i), range(1, 7 + 14 * i), 30))
        for _ in range(8):
            harness.step()
    harness.drain()
    stats = engine.stats()
    engine.close()

    # A step is launched by the host where its backend must plan it, and whole where it need not.
    assert (counts["whole"] > 0) is (attn != "toy-planned")
    assert counts["pieces"] > 0 and not counts["eager"]
    assert stats.replayed_verify_steps == stats.verify_steps > 10


@pytest.mark.parametrize("kind", often(1, ["truncated", "penalties", "warm", "greedy"]))
def test_every_kind_of_sampling_is_that_of_one_token_at_a_time(toys: Toys, kind: str) -> None:
    params = {
        "greedy": {"temperature": 0.0},
        "warm": {"temperature": 1.5, "seed": 3},
        "truncated": {"temperature": 1.5, "seed": 4, "top_k": 9, "min_p": 0.01},
        "penalties": {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.3},
    }[kind]
    requests = [
        request(f"{i}", range(i, 12), 40, params=SamplingParams(**params)) for i in range(4)
    ]
    answers = []
    for settings in ({}, {"proposer": "guess", "opt": ("guess.right=0.9",)}):
        engine = toys.engine(runner="rerun", **settings)
        answers.append(EngineHarness(engine).run(requests).outputs)
        verified = engine.stats().verify_steps
        engine.close()
    assert answers[0] == answers[1] and verified > 0


def test_rows_up_to_the_very_end_of_the_tables_are_verified_without_a_graph(toys: Toys) -> None:
    requests = [request(str(i), np.arange(i) % 50, 160 - i) for i in range(150, 158)]
    engine = toys.engine(
        runner="rerun", proposer="guess", opt=RIGHT, max_running_requests=1, overlap=False
    )
    counts = watch(engine)
    harness = EngineHarness(engine).run(requests)
    engine.close()

    assert harness.outputs == {one.id: expected(one) for one in requests}
    assert counts["whole"] > counts["pieces"] > 0, "padding would be past the tables' end"


def test_more_tokens_than_a_graph_is_worth_are_verified_in_pieces(toys: Toys) -> None:
    assert verify_rows((64, 32, 8, 1), 5) == (8, 1) and VERIFY_TOKENS >= 25 * 5
    assert verify_rows((64, 1), 1) == ()
    engine = toys.engine(
        runner="rerun", proposer="guess", opt=(*RIGHT, "guess.drafts=15"), num_pages=300
    )
    runner: Any = getattr(engine.executor, "inner", engine.executor).runner
    assert sorted(runner.buckets.of_kind("verify")) == [1, 2, 4, 8]
    assert [bucket.size for bucket in runner.buckets.of_kind("verify").values()] == [
        16,
        32,
        64,
        128,
    ]
    counts = watch(engine)
    EngineHarness(engine).run(random_requests(np.random.default_rng(0), 12, greedy=True))
    engine.close()
    assert not counts["eager"]


def test_without_a_proposer_nothing_is_captured_for_drafts(toys: Toys) -> None:
    engine = toys.engine(runner="rerun")
    runner: Any = getattr(engine.executor, "inner", engine.executor).runner
    assert runner.buckets.of_kind("rows") and not runner.buckets.of_kind("verify")
    engine.close()
