"""What a model that keeps a state reuses of earlier requests, on the real engine and the toy model:
a state behind other tokens than the row's shows as a wrong token.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_engine import EngineHarness, Toys, installed, request

PAGE = 4


@pytest.fixture
def toys(tmp_path: Path) -> Iterator[Toys]:
    """The toy model and its parts."""
    with installed(tmp_path) as folder:
        yield folder


def make_engine(toys: Toys, **settings: Any) -> Any:
    """An engine that copies states after 32 tokens of a prompt."""
    sizes = {"page_size": PAGE, "num_pages": 200, "max_running_requests": 4}
    sizes |= {"max_batch_tokens": 40, "snapshot_tokens": 32, "debug_invariants": True}
    return toys.engine(state=True, **sizes | settings)


def run_one(engine: Any, name: str, prompt: np.ndarray, most: int = 5) -> tuple[list[int], int]:
    """The answer of a request that runs alone, and how many of its tokens were cached."""
    before = engine.stats().cached_tokens
    harness = EngineHarness(engine).run([request(name, prompt, most)])
    return harness.outputs[name], engine.stats().cached_tokens - before


@pytest.mark.feature("V11")
@pytest.mark.parametrize("overlap", [False, True])
def test_a_conversation_goes_on_from_its_last_answer(toys: Toys, overlap: bool) -> None:
    engine = make_engine(toys, overlap=overlap)
    talk, rng = np.arange(70) % 50, np.random.default_rng(0)
    cached = []
    for turn in range(3):
        answer, hit = run_one(engine, str(turn), talk, 13)
        cached.append(hit)
        seen = len(talk) + len(answer) - 1  # the last token is never computed
        talk = np.concatenate([talk, answer, rng.integers(0, 50, 6)])
        if turn < 2:
            expected = seen // PAGE * PAGE
    assert cached[0] == 0 and cached[2] == expected
    engine.close()


@pytest.mark.feature("V11")
@pytest.mark.parametrize(("every", "first"), [(32, 96), (256, 0)])
def test_a_shared_beginning_is_reused_at_regular_places_and_where_prompts_part(
    toys: Toys, every: int, first: int
) -> None:
    engine = make_engine(toys, snapshot_tokens=every)
    rng = np.random.default_rng(1)
    shared = rng.integers(0, 50, 126)
    hits = [
        run_one(engine, str(n), np.concatenate([shared, rng.integers(0, 50, 14)]), 1)[1]
        for n in range(4)
    ]

    # The second leaves a state where it parts from the first.
    assert hits == [0, first, 124, 124]
    engine.close()


@pytest.mark.feature("V11")
def test_the_same_prompt_again_is_computed_from_its_last_cut(toys: Toys) -> None:
    engine = make_engine(toys, snapshot_tokens=1024)
    prompt = np.arange(100) % 50

    assert [run_one(engine, str(n), prompt, 1)[1] for n in range(2)] == [0, 96]
    # So short a prompt is not cut for its end.
    assert [run_one(engine, f"s{n}", prompt[::-1][:60], 1)[1] for n in range(2)] == [0, 0]
    engine.close()


@pytest.mark.feature("V11")
def test_requests_that_come_together_wait_for_the_state_that_the_first_leaves(toys: Toys) -> None:
    engine = make_engine(toys)
    rng = np.random.default_rng(2)
    shared = rng.integers(0, 50, 70)
    prompts = [np.concatenate([shared, rng.integers(0, 50, 5)]) for _ in range(4)]
    harness = EngineHarness(engine).run(
        [request(str(n), prompt, 4) for n, prompt in enumerate(prompts)]
    )

    assert set(harness.reasons.values()) == {"length"}
    assert engine.stats().cached_tokens >= 3 * 64
    engine.close()


@pytest.mark.feature("V11")
def test_with_few_pages_of_states_the_oldest_go_first_and_rows_have_theirs(toys: Toys) -> None:
    engine = make_engine(toys, snapshot_ratio=0.001)
    assert engine.limits.num_pages[-1] == 4 + 2
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 50, 70) for _ in range(9)]
    for n, prompt in enumerate(prompts):
        run_one(engine, f"a{n}", prompt)

    # Three rows are free, so that their pages hold states too.
    assert [run_one(engine, f"b{n}", prompts[n])[1] for n in (8, 0)] == [64, 0]
    harness = EngineHarness(engine).run(
        [request(f"c{n}", prompt, 9) for n, prompt in enumerate(prompts)]
    )
    assert set(harness.reasons.values()) == {"length"}
    engine.close()


@pytest.mark.feature("V11")
def test_tenants_share_no_states(toys: Toys) -> None:
    engine = make_engine(toys)
    prompt = np.arange(70) % 50
    for namespace in ("ada", "bob"):
        before = engine.stats().cached_tokens
        EngineHarness(engine).run([request("a", prompt, 3, namespace=namespace)])
        assert engine.stats().cached_tokens == before
    engine.close()
