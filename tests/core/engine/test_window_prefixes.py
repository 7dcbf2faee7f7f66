"""Prefixes of a model with a window group beside a full one."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core.faults.conftest import crash_reports, toys
from often import often
from toy_engine import EngineHarness, Toys, random_requests, request

from headstock.cli.main import main
from headstock_conformance.scheduler.toy_device import VOCAB

__all__ = ["crash_reports", "toys"]

SCARCE = (41, 60, 200)
"""The numbers of pages below with which rows preempt each other."""


def tokens(count: int, seed: int = 0) -> np.ndarray:
    """Random tokens of the toy model."""
    return np.random.default_rng(seed).integers(0, VOCAB, count)


@pytest.mark.feature("H4")
@pytest.mark.parametrize(
    ("settings", "overlap"),
    often(
        1,
        [
            ({"window": 9, "num_pages": 41}, True),
            ({"window": 30, "max_batch_tokens": 17}, False),
            ({"window": 9, "num_pages": 41}, False),
            ({"window": 30, "max_batch_tokens": 17}, True),
            *product(
                [
                    {"window": 1, "page_size": 1, "num_pages": 200},
                    {"window": 5, "attn": "toy-sharing", "num_pages": 60},
                    {"window": 21, "page_size": 16, "num_pages": 12, "max_batch_tokens": 200},
                ],
                [True, False],
            ),
        ],
    ),
    ids=str,
)
def test_rows_that_share_a_window_get_the_tokens_that_they_get_alone(
    toys: Toys,
    overlap: bool,
    settings: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "run.recording"
    common = {"overlap": overlap, "debug_canary": True, "record": str(path)}
    engine = toys.engine(**(common | settings))
    full, window = engine.limits.num_pages
    harness = EngineHarness(engine).run(random_requests(np.random.default_rng(5), 20, greedy=True))

    stats = engine.stats()
    assert ("prefix reuse", "on", "cache_type (--cache-type) radix") in engine.summary.table
    assert stats.cached_tokens > 50 and len(harness.outputs) == 20
    assert bool(stats.preemptions) == (settings.get("num_pages") in SCARCE)
    assert stats.total_pages == full + window == stats.free_pages + stats.cached_pages
    policy, index = engine.limits.policy, engine.state.index
    assert policy.count_evictable(index, 0) + policy.count_evictable(index, 1) == stats.cached_pages
    engine.close()
    capsys.readouterr()
    assert main(["replay", str(path), "--check"]) == 0
    assert capsys.readouterr().out == f"{stats.steps} steps, identical\n"


@pytest.mark.parametrize("overlap", often(1, [True, False]))
def test_a_window_has_its_own_number_of_pages(toys: Toys, overlap: bool) -> None:
    sizes = {"max_running_requests": 2, "max_batch_tokens": 16, "window": 8, "num_pages": 100}
    engine = toys.engine(overlap=overlap, debug_canary=True, **sizes)
    assert engine.limits.num_pages[1] < 30
    harness = EngineHarness(engine).run(random_requests(np.random.default_rng(6), 24, greedy=True))

    assert engine.stats().cached_tokens > 20 and len(harness.outputs) == 24
    engine.close()


def count_hits(harness: EngineHarness, prompt: np.ndarray) -> int:
    """How many tokens of a prompt that comes alone are cached."""
    before = harness.engine.stats().cached_tokens
    harness.run([request(f"{len(harness.outputs)}", prompt, 4)])
    return harness.engine.stats().cached_tokens - before


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("chunk", [16, 160])
def test_a_prompt_is_found_up_to_where_it_parts_from_another(
    toys: Toys, overlap: bool, chunk: int
) -> None:
    engine = toys.engine(window=6, overlap=overlap, max_batch_tokens=chunk, max_seq_len=160)
    harness, prompt = EngineHarness(engine), tokens(120)
    assert count_hits(harness, prompt) == 0

    # The prompt is longer than the window, and with 160 it is one chunk: pages far behind the
    # window are found all the same.
    other = np.concatenate([prompt[:50], tokens(60, seed=1)])
    assert count_hits(harness, other) == 48
    assert count_hits(harness, np.concatenate([prompt, harness.outputs["0"], [1]])) == 120
    assert count_hits(harness, prompt[:14]) == 12
    engine.close()


def test_a_prefix_is_found_as_far_as_its_window_was_not_evicted(toys: Toys) -> None:
    sizes = {"max_running_requests": 1, "max_batch_tokens": 16, "num_pages": 200}
    engine = toys.engine(window=6, **sizes)
    harness, prompt = EngineHarness(engine), tokens(120)
    count_hits(harness, prompt)
    full, window = engine.limits.num_pages
    assert full == 200 and window < 15

    # The full group has all of the prompt, and the window group what was computed last.
    assert count_hits(harness, prompt[:60]) == 0
    assert count_hits(harness, prompt) == 60
    engine.close()
