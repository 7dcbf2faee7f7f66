"""Tokens do not depend on overlap, concurrency, chunks, neighbours or hits: exactly, on the toy
model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import evolve
from often import often
from toy_engine import EngineHarness, Toys, random_requests

from headstock import LLM, SamplingParams
from headstock.scheduler import Request


def run(toys: Toys, requests: list[Request], **settings: Any) -> EngineHarness:
    """All requests through one engine."""
    engine = toys.engine(debug_invariants=False, **settings)
    try:
        return EngineHarness(engine).run(requests)
    finally:
        engine.close()


@pytest.mark.feature("S18")
@pytest.mark.parametrize("rows", often(1, [8, 32, 128, 1]))
def test_tokens_do_not_depend_on_overlap_at_any_concurrency(toys: Toys, rows: int) -> None:
    requests = random_requests(np.random.default_rng(rows), rows + 24)
    alone = run(toys, requests, max_running_requests=1, overlap=False, cache_type="naive")
    sizes = {
        "max_running_requests": rows,
        "max_batch_tokens": rows + 30,
        "page_size": 1,
        "num_pages": 150 + 7 * rows,
    }
    on, off = (run(toys, requests, overlap=overlap, **sizes) for overlap in (True, False))

    assert on.outputs == off.outputs == alone.outputs
    assert on.reasons == off.reasons == alone.reasons and set(on.reasons.values()) == {
        "stop",
        "length",
    }
    assert rows == 1 or on.engine.stats().cached_tokens > 0
    assert rows == 1 or on.engine.state.num_preempted > 0, (
        "the pool is too large to put anything to the test"
    )


@pytest.mark.feature("S18")
@pytest.mark.parametrize("seed", often(1, range(20)))
def test_rows_whose_last_token_must_be_read_first_change_nothing_for_themselves_and_for_others(
    toys: Toys, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    requests = random_requests(rng, 26)
    some = [evolve(one, wait_for_sample=bool(rng.random() < 0.4)) for one in requests]
    sizes = {"max_running_requests": 8, "max_batch_tokens": 40, "num_pages": 60}
    free, mixed, all_of_them = (
        run(toys, variant, overlap=True, **sizes)
        for variant in (requests, some, [evolve(one, wait_for_sample=True) for one in requests])
    )

    assert 2 < sum(one.wait_for_sample for one in some) < 24
    assert free.outputs == mixed.outputs == all_of_them.outputs
    assert free.reasons == mixed.reasons == all_of_them.reasons and set(free.reasons.values()) == {
        "stop",
        "length",
    }
    assert free.engine.state.num_steps < all_of_them.engine.state.num_steps, (
        "no request waited for a token"
    )


@pytest.mark.feature("S18")
@pytest.mark.parametrize("rows", often(1, [8, 128]))
def test_aborts_that_come_a_step_late_leave_the_others_their_tokens(toys: Toys, rows: int) -> None:
    rng = np.random.default_rng(rows)
    requests = random_requests(rng, rows + rows // 2, greedy=True)
    harness = EngineHarness(
        toys.engine(max_running_requests=rows, max_batch_tokens=rows + 20, num_pages=12 * rows)
    )
    aborted: set[str] = set()
    for one in requests:
        harness.submit(one)
    while harness.engine.has_work:
        harness.step()  # checks each request as it ends
        assert aborted <= harness.reasons.keys(), "it runs on though aborted"
        for name in rng.choice(list(harness.requests), 2):
            if rng.random() < 0.2:
                harness.engine.abort(str(name))
                aborted.add(str(name))
    harness.drain()
    harness.engine.close()

    assert "error" not in harness.reasons.values(), "a request failed that nothing was wrong with"
    assert set(harness.reasons.values()) >= {"length", "abort"}


@pytest.mark.feature("S18")
@pytest.mark.parametrize("seed", often(1, range(4)))
def test_pages_that_a_running_step_reads_go_to_the_next_one_which_runs_after_it(
    toys: Toys, seed: int
) -> None:
    requests = random_requests(np.random.default_rng(seed), 60, greedy=True)
    sizes = {"max_running_requests": 8, "max_batch_tokens": 40, "num_pages": 60}
    harness = EngineHarness(toys.engine(scheduler="prefill-first", cache_type="naive", **sizes))
    for one in requests:
        harness.submit(one)
    handed_on = 0
    while harness.engine.has_work:
        rows = harness.engine.plan.rows.tolist() if harness.engine.plan is not None else []
        read = {page for row in rows for page in harness.engine.state.pages[0][row].tolist()}
        harness.step()  # the plan is launched, and the next one is made while it runs
        handed_on += len(read & set(harness.engine.plan.page_numbers.tolist()))
    harness.drain()
    harness.engine.close()

    assert "error" not in harness.reasons.values(), "a request failed that nothing was wrong with"
    assert handed_on > 20, "nothing was put to the test"


@pytest.mark.feature("S18")
def test_overlap_changes_nothing_on_the_demo_model() -> None:
    prompts = [
        "Once upon a time",
        "Once upon a time, there was a fox",
        "12 + 31 =",
        "Anna had a boat.",
    ]
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=24, frequency_penalty=0.7, ignore_eos=True),
        SamplingParams(temperature=1.0, max_tokens=24, seed=3, n=3),
        SamplingParams(temperature=0.0, max_tokens=24, min_tokens=12, stop=[" the"]),
        SamplingParams(
            temperature=0.8, max_tokens=24, top_k=8, repetition_penalty=1.1, seed=9, n=2
        ),
    ]
    answers = []
    for overlap in (True, False):
        with LLM(
            "demo", overlap=overlap, num_pages=200, max_batch_tokens=16, max_running_requests=16
        ) as llm:
            answers.append(llm.generate(prompts * 4, [kind for kind in kinds for _ in prompts]))
    texts = [[output.text for answer in batch for output in answer.outputs] for batch in answers]

    assert texts[0] == texts[1] and len(texts[0]) == 4 * (1 + 3 + 1 + 2)
