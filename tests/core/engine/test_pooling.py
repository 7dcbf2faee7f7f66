"""Prompts that are pooled, in every mode of the engine and beside others that generate."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from often import often
from toy_engine import EngineHarness, Toys, installed, random_requests, request, to_pooling

from headstock.cli.main import main
from headstock.engine.engine import Engine
from headstock.errors import CapacityError, RequestError
from headstock.scheduler import Request
from headstock.spi import Sample, Step

NARROW = {"max_running_requests": 6, "max_batch_tokens": 13, "num_pages": 41}
"""Prompts come in chunks, and rows are preempted."""

MODES: dict[str, dict[str, Any]] = {
    "narrow": NARROW,
    "no overlap": NARROW | {"overlap": False},
    "no reuse": NARROW | {"cache_type": "naive"},
    "contiguous": {
        "paged_attn": "off",
        "page_size": "auto",
        "num_pages": 4,
        "max_running_requests": 6,
    },
    "no cache": {"kv_cache": False},
    "window": NARROW | {"window": 7},
    "state": NARROW | {"state": True},
    "drafts": NARROW | {"proposer": "ngram"},
}


@pytest.fixture
def toys(tmp_path: Path) -> Iterator[Toys]:
    """The toy model and its parts."""
    with installed(tmp_path) as folder:
        yield folder


def pooled(name: str, prompt: Any, kind: Any = "mean") -> Request:
    """A request that pools these tokens."""
    return to_pooling(request(name, prompt), kind)


@pytest.mark.feature("R5")
@pytest.mark.parametrize(("seed", "mode"), often(2, list(product(range(1, 9), MODES))))
def test_vectors_and_tokens_are_right_in_every_mode(toys: Toys, mode: str, seed: int) -> None:
    engine = toys.engine(**MODES[mode])
    requests = random_requests(np.random.default_rng(seed), 18, pooled=0.5)
    harness = EngineHarness(engine).run(requests)

    assert set(harness.reasons.values()) == {"stop", "length"}
    assert harness.embeddings.keys() == {one.id for one in requests if one.pooling}
    assert {one.pooling for one in requests} == {"", "last", "mean"}
    engine.close()


@pytest.mark.feature("R5")
@pytest.mark.parametrize("overlap", [True, False])
def test_a_preempted_row_pools_from_its_first_token_again(toys: Toys, overlap: bool) -> None:
    engine = toys.engine(
        overlap=overlap, max_batch_tokens=8, num_pages=40, max_running_requests=2, page_size=4
    )
    harness = EngineHarness(engine)
    harness.submit(pooled("low", np.arange(100) % 50))
    for _ in range(5):
        harness.step()
    # It needs pages of the row before it, which has computed some of its chunks.
    harness.submit(attrs.evolve(request("high", np.arange(90) % 7), priority=1))
    harness.drain()

    assert harness.preemptions["low"] == 1
    engine.close()


def test_last_takes_prefix_hits_and_mean_computes_every_token(toys: Toys) -> None:
    engine = toys.engine()
    harness = EngineHarness(engine).run([request("first", range(40))])
    before = engine.stats().cached_tokens
    harness.run([pooled("last", range(40), "last")])
    hits = engine.stats().cached_tokens - before
    harness.run([pooled("mean", range(40))])

    assert hits == 36  # the last token's page is computed anew
    assert engine.stats().cached_tokens == before + hits
    # Their own pages are indexed like any other's.
    harness.run([pooled("other", range(10, 40)), request("after", range(10, 40))])
    assert engine.stats().cached_tokens > before + hits
    engine.close()


def test_a_prompt_may_be_as_long_as_any_sequence_and_no_longer(toys: Toys) -> None:
    engine = toys.engine(max_batch_tokens=24)
    EngineHarness(engine).run([pooled("whole", np.arange(160) % 50)])
    with pytest.raises(CapacityError, match="the prompt has 161 tokens, but a sequence may have"):
        engine.submit(pooled("longer", np.arange(161) % 50))
    with pytest.raises(CapacityError, match="the prompt is empty"):
        engine.submit(pooled("nothing", ()))
    engine.close()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_row_with_nan_fails_alone_and_leaves_nothing_to_the_next(
    toys: Toys, overlap: bool
) -> None:
    engine = toys.engine(
        overlap=overlap, max_batch_tokens=16, max_running_requests=2, faults=("nan@1:0",)
    )
    harness = EngineHarness(engine).run(
        [pooled("hit", range(40)), pooled("beside", range(3, 9)), pooled("next", range(5, 30))]
    )

    assert harness.reasons == {"hit": "error", "beside": "stop", "next": "stop"}
    engine.close()


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_nan_within_a_chunk_is_seen_though_a_later_chunk_is_sound(toys: Toys, kind: str) -> None:
    engine = toys.engine(max_batch_tokens=16, faults=("nan@0:0",), overlap=False)
    harness = EngineHarness(engine).run([pooled("hit", range(40), kind)])

    assert harness.reasons == {"hit": "error"}
    engine.close()


def without_pooling(engine: Engine) -> None:
    """Give the engine a runner whose spec does not claim pooling."""
    runner = engine.preparation.runner
    claims = attrs.evolve(runner.capabilities, pooling=False)
    runner = attrs.evolve(runner, capabilities=claims)
    engine.preparation = attrs.evolve(engine.preparation, runner=runner)


def test_a_runner_that_does_not_claim_it_is_named(toys: Toys) -> None:
    engine = toys.engine()
    without_pooling(engine)
    with pytest.raises(RequestError, match="the runner eager does not support pooling"):
        engine.submit(pooled("a", range(5)))
    EngineHarness(engine).run([request("b", range(5))])
    engine.close()


def test_a_runner_that_claims_it_and_pools_nothing_fails_the_step(
    toys: Toys, caplog: pytest.LogCaptureFixture
) -> None:
    engine = toys.engine(overlap=False)
    runner = engine.executor.runner  # type: ignore[attr-defined]
    run = runner.run

    def run_without(step: Step) -> Sample:
        batch = step.batch
        vars(step)["batch"] = lambda: attrs.evolve(batch(), pooling=None)
        sample: Sample = run(step)
        return sample

    runner.run = run_without
    harness = EngineHarness(engine).run([pooled("a", range(5)), request("b", range(7))])

    assert harness.reasons["a"] == "error" and "a" not in harness.embeddings
    assert "pooled hidden states of the runner: expected shape (1, 1), got None" in caplog.text
    engine.close()


def test_a_recording_of_pooled_prompts_replays(
    toys: Toys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.recording"
    engine = toys.engine(**NARROW, record=str(path))
    requests = random_requests(np.random.default_rng(2), 12, pooled=0.5)
    EngineHarness(engine).run(requests)
    engine.close()

    capsys.readouterr()
    assert main(["replay", str(path), "--check"]) == 0
    assert "identical" in capsys.readouterr().out
