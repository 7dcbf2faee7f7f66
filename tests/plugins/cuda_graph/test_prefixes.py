"""Graphs of steps whose rows share pages, alone and beside prompts."""

from __future__ import annotations

import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from often import often
from step_watch import watch_steps
from toy_engine import EngineHarness, Toys, request

from headstock.engine.engine import Engine
from headstock.scheduler import Request
from headstock.spi import PrefixGroups
from headstock_cuda_graph import prompt_graphs
from headstock_cuda_graph.runner import CudaGraphRunner

SIZES = {"max_running_requests": 24, "max_batch_tokens": 50, "num_pages": 400}


def sharing(toys: Toys, **settings: Any) -> Engine:
    """An engine whose rows are grouped wherever they share a page."""
    return toys.engine(**({"attn": "toy-sharing", "runner": "rerun"} | SIZES | settings))


def runner_of(engine: Engine) -> CudaGraphRunner:
    """The engine's runner."""
    executor: Any = engine.executor
    while not hasattr(executor, "runner"):
        executor = executor.inner
    return getattr(executor.runner, "inner", executor.runner)


def prefix_requests(count: int, length: int = 9) -> list[Request]:
    """Requests of which every other one begins as the first, and all end at other times."""
    rng = np.random.default_rng(3)
    first, second = rng.integers(0, 50, (2, 30))
    return [
        request(
            str(number),
            np.concatenate(((first, second)[number % 2], rng.integers(0, 50, length))),
            4 + 3 * (number % 5),
        )
        for number in range(count)
    ]


def run(engine: Engine, requests: list[Request]) -> tuple[dict[str, Any], Counter[str]]:
    """The outputs, and how steps went."""
    counts = watch_steps(engine)
    outputs = EngineHarness(engine).run(requests).outputs
    engine.close()
    return outputs, counts


def list_shared(engine: Engine) -> dict[int, tuple[int, int] | None]:
    """The most rows and the longest context of each size's graph beside prompts."""
    return {
        size: None if each.shared is None else (each.shared.rows, each.shared.longest)
        for size, each in runner_of(engine).buckets.of_kind("prompt").items()
    }


@pytest.mark.feature("V5", "V6")
def test_sizes_of_few_tokens_have_a_graph_for_decode_rows_that_share_pages(
    toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_graphs, "FEW_TOKENS", 32)
    engine = sharing(toys)
    most = engine.config.max_seq_len
    assert list_shared(engine) == {16: (16, most), 32: (24, most), 48: None, 64: None}
    engine.close()


@pytest.mark.feature("V5", "V6")
@pytest.mark.parametrize(
    "settings",
    [
        {"attn": "toy"},
        {"attn": "toy,toy-sharing"},  # another backend attends for prompts
        {"cache_type": "naive"},
        {"opt": ("rerun.whole_rows=0",)},
        {"opt": ("rerun.whole_rows=7",)},
        {"max_running_requests": 7},
    ],
    ids=str,
)
def test_no_such_graph_is_captured_where_none_could_be_replayed(
    toys: Toys, settings: dict[str, Any]
) -> None:
    engine = sharing(toys, **settings)
    assert set(list_shared(engine).values()) == {None}
    engine.close()


@pytest.mark.feature("V5", "V6")
@pytest.mark.parametrize("opt", often(1, [((),), (("rerun.short_context=42",),)]))
def test_rows_are_grouped_beside_prompts_in_whole_graphs_that_read_their_groups(
    toys: Toys, opt: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Steps of more tokens and of more rows go in pieces or by graphs that read each row by itself.
    monkeypatch.setattr(prompt_graphs, "FEW_TOKENS", 48)
    requests = prefix_requests(60)
    eager, none = run(sharing(toys, attn="toy", runner="eager"), requests)
    outputs, counts = run(sharing(toys, opt=opt, debug_canary=True), requests)

    assert outputs == eager and not none["groups"]
    assert counts["mixed"] == counts["whole"] > 5
    assert counts["between"] > 0


@pytest.mark.feature("V5", "V6")
@pytest.mark.parametrize(("opt", "most"), [((), 24), (("rerun.whole_rows=17",), 17)])
def test_groups_have_the_graph_of_most_rows_and_long_contexts_alone(
    toys: Toys, opt: tuple[str, ...], most: int
) -> None:
    engine = sharing(toys, opt=("rerun.short_context=30", *opt))
    runner, longest = runner_of(engine), engine.config.max_seq_len
    for rows, context, is_served in (
        (most, 31, True),
        (2, longest, True),
        (most, 30, False),  # by a graph of short contexts, which reads each row by itself
        (most + 1, 31, False),
        (2, longest + 1, False),
    ):
        bucket = runner.find_prompt_bucket(rows, 32)
        assert runner.prompts is not None
        found = bucket is not None and runner.prompts.can_share(bucket, rows, context)
        assert found is is_served, (rows, context)
    assert runner.find_prompt_bucket(2, 65) is None
    engine.close()


@pytest.mark.feature("V5", "V6")
@pytest.mark.parametrize(
    "settings", often(1, [{"opt": ("rerun.whole_rows=0",)}, {"cuda_graph_max_tokens": 0}]), ids=str
)
def test_pieces_and_steps_without_graphs_read_each_row_by_itself(
    toys: Toys, settings: dict[str, Any]
) -> None:
    requests = prefix_requests(40)
    eager, _ = run(sharing(toys, attn="toy", runner="eager"), requests)
    outputs, counts = run(sharing(toys, **settings), requests)

    assert outputs == eager
    assert counts["groups"] and counts["between"] and not counts["mixed"]


@pytest.mark.feature("V5", "V6")
def test_steps_that_score_prompts_read_each_row_by_itself(toys: Toys) -> None:
    requests = [
        evolve(each, params=evolve(each.params, prompt_logprobs=1), prompt_logprobs=True)
        if number % 20 == 19
        else each
        for number, each in enumerate(prefix_requests(40))
    ]
    eager, _ = run(sharing(toys, attn="toy", runner="eager"), requests)
    outputs, counts = run(sharing(toys), requests)
    assert outputs == eager and counts["between"] and counts["mixed"] == counts["whole"] > 0


@pytest.mark.feature("V5", "V6")
def test_a_runner_in_which_faults_are_due_has_groups_beside_prompts_too(toys: Toys) -> None:
    requests = prefix_requests(40)
    eager, _ = run(sharing(toys, attn="toy", runner="eager"), requests)
    # The fault is due long after the end.
    outputs, counts = run(sharing(toys, faults=("nan@100000:1",)), requests)
    assert outputs == eager and counts["mixed"] == counts["whole"] > 5


@pytest.mark.feature("G2", "V5")
@pytest.mark.parametrize("overlap", often(1, [True, False]))
def test_captures_between_steps_do_not_see_the_groups_of_these(
    toys: Toys, overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    requests = prefix_requests(60)
    eager, _ = run(sharing(toys, attn="toy", runner="eager"), requests)
    watched = {"debug_invariants": False, "debug_canary": True}
    engine = sharing(toys, overlap=overlap, **watched)
    harness, rng = EngineHarness(engine), np.random.default_rng(1)
    for one in requests:
        harness.submit(one)
    with caplog.at_level(logging.WARNING, "headstock"):
        while engine.has_work:
            harness.step()
            if rng.random() < 0.5:
                engine.prepare_next()
    assert harness.drain().outputs == eager
    # The backend refuses rows that share more than they have, and a failure ends all captures.
    assert [record.getMessage() for record in caplog.records] == []
    engine.close()


@pytest.mark.feature("V5")
@torch.inference_mode()
def test_groups_are_written_once_and_anew_after_a_capture(toys: Toys) -> None:
    engine = sharing(toys)
    prefixes = runner_of(engine).prefixes
    assert prefixes is not None and prefixes.prepare_capture(7) is None
    groups = PrefixGroups(counts=np.array([2, 3], np.int32), lens=np.array([8, 4], np.int32))
    step: Any = SimpleNamespace(groups=groups)
    prefixes.write(step)
    wanted = [8, 8, 4, 4, 4, 0, 0, 0]
    assert prefixes.first_rows(8).shared_lens.tolist() == wanted
    prefixes.inputs.memory.zero_()
    prefixes.write(step)
    assert not prefixes.inputs.shared_lens.any()

    inputs = prefixes.prepare_capture(8)
    assert inputs is not None and not inputs.shared_lens.any() and not inputs.group_starts.any()
    prefixes.write(step)
    assert inputs.shared_lens.tolist() == wanted
    engine.close()
