"""Rows that share pages run side by side: the same tokens, whatever joins, leaves or fails."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from core.faults.conftest import crash_reports, toys
from often import often
from step_watch import watch_steps
from toy_engine import EngineHarness, Toys, request

from headstock import SamplingParams
from headstock.scheduler import Request
from headstock_conformance.scheduler.toy_device import VOCAB

__all__ = ["crash_reports", "toys"]


def prefix_requests(random: np.random.Generator, count: int, **changes: Any) -> list[Request]:
    """Requests that begin with one of three prefixes, one of which begins as another, or none."""
    first, second = random.integers(0, VOCAB, (2, 40))
    prefixes = (first, second[:17], np.concatenate([first[:24], second[:13]]), first[:0])
    return [
        request(
            str(number),
            np.concatenate(
                [prefixes[random.integers(4)], random.integers(0, VOCAB, random.integers(1, 20))]
            ),
            int(random.integers(1, 30)),
            **changes,
        )
        for number in range(count)
    ]


def run(toys: Toys, requests: list[Request], **settings: Any) -> tuple[EngineHarness, Counter[str]]:
    """What comes of the requests, and how often rows were grouped."""
    sizes = {"max_running_requests": 12, "max_batch_tokens": 60, "num_pages": 300}
    engine = toys.engine(**(sizes | settings))
    counts = watch_steps(engine)
    harness = EngineHarness(engine).run(requests)
    counts["preemptions"] = engine.stats().preemptions
    engine.close()
    return harness, counts


@pytest.mark.feature("P11", "G2", "V5")
@pytest.mark.parametrize(
    ("runner", "overlap"),
    often(1, [("rerun", True), ("eager", False), ("rerun", False), ("eager", True)]),
)
@pytest.mark.parametrize(
    "settings",
    often(
        1,
        [
            {},
            {"num_pages": 60},
            {"page_size": 1, "num_pages": 1200},
            {"cuda_graph_max_tokens": 0},
        ],
    ),
    ids=str,
)
def test_grouped_rows_make_the_tokens_of_rows_by_themselves(
    toys: Toys,
    runner: str,
    overlap: bool,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headstock_cuda_graph.prefixes.SHARED_ROWS", 4)
    requests = prefix_requests(np.random.default_rng(3), 60)
    common = {"runner": runner, "overlap": overlap, "debug_canary": True} | settings
    plain, _ = run(toys, requests, attn="toy", **common)
    sharing, counts = run(toys, requests, attn="toy-sharing", **common)

    assert (sharing.outputs, sharing.reasons) == (plain.outputs, plain.reasons)
    assert all(counts[name] for name in ("groups", "several", "moved", "alone")), counts
    # Beside prompts rows are grouped in whole graphs alone.
    is_whole = runner == "rerun" and settings.get("cuda_graph_max_tokens") != 0
    assert all(bool(counts[name]) is is_whole for name in ("mixed", "whole")), counts
    assert is_whole or counts["between"]
    assert bool(counts["preemptions"]) == (settings.get("num_pages") == 60)


@pytest.mark.parametrize("runner", often(1, ["rerun", "eager"]))
def test_each_row_keeps_its_own_settings_where_rows_move(
    toys: Toys, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstock_cuda_graph.prefixes.SHARED_ROWS", 2)
    outputs = []
    for attn in ("toy", "toy-sharing"):
        requests = [
            evolve(one, params=params)
            for one, params in zip(
                prefix_requests(np.random.default_rng(8), 24),
                (
                    SamplingParams(temperature=0.9, seed=3),
                    SamplingParams(temperature=1.3, top_k=5, seed=4, logprobs=2),
                    SamplingParams(temperature=0.0, frequency_penalty=0.7),
                    SamplingParams(temperature=0.0),
                )
                * 6,
                strict=True,
            )
        ]
        harness, counts = run(toys, requests, attn=attn, runner=runner)
        outputs.append((harness.outputs, harness.reasons))
        assert attn == "toy" or counts["moved"] > 3
    assert outputs[0] == outputs[1]


@pytest.mark.feature("V5")
@pytest.mark.parametrize(
    ("settings", "is_tracked"),
    [
        ({}, True),
        ({"cache_type": "naive"}, False),
        ({"paged_attn": "off", "num_pages": None, "page_size": "auto"}, False),
        ({"max_running_requests": 1}, False),
        ({"attn": "toy"}, False),
    ],
    ids=str,
)
def test_rows_are_followed_only_where_they_can_share_pages(
    toys: Toys, settings: dict[str, Any], is_tracked: bool
) -> None:
    engine = toys.engine(**({"attn": "toy-sharing"} | settings))
    executor: Any = engine.executor
    while not hasattr(executor, "steps"):
        executor = executor.inner
    assert (executor.steps.tracker is not None) is is_tracked
    engine.close()


@pytest.mark.feature("G11", "P10")
@pytest.mark.parametrize("runner", ["eager", "rerun"])
def test_the_row_that_fails_is_the_one_that_moved(
    toys: Toys, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstock_cuda_graph.prefixes.SHARED_ROWS", 2)
    requests = [
        request(str(number), np.concatenate([np.arange(9) + 20 * (number % 2), [number]]), 12)
        for number in range(6)
    ]
    outputs = []
    for attn in ("toy", "toy-sharing"):
        harness, counts = run(
            toys, requests, attn=attn, runner=runner, faults=("nan@6:3",), overlap=False
        )
        outputs.append((harness.outputs, harness.reasons))
        assert Counter(harness.reasons.values()) == {"length": 5, "error": 1}
        assert attn == "toy" or counts["moved"] > 3
    assert outputs[0] == outputs[1]
