"""A model that keeps a state beside its keys and values, on the real engine and the toy model: a
state that is another row's, stale or not there shows as a wrong token.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rerun
import torch
import toy_plugins
from attrs import evolve
from often import often
from toy_engine import (
    EngineHarness,
    Toys,
    installed,
    random_requests,
    random_settings,
    request,
)

from headstock.debug.canary import PATTERN
from headstock.errors import CannotRun, EngineDied
from headstock.execution.buffers import Buffers
from headstock.spi import LayoutKind
from headstock.spi.step import MOST_SAVED


@pytest.fixture
def toys(tmp_path: Path) -> Iterator[Toys]:
    """The toy model and its parts."""
    with installed(tmp_path) as folder:
        yield folder


def count_replays(runner: Any, name: str, counts: Counter[str]) -> None:
    """Count the steps that this method of the runner replays."""
    replay = getattr(runner, name)

    def counted(step: Any) -> Any:
        sample = replay(step)
        counts[name] += sample is not None
        return sample

    setattr(runner, name, counted)


@pytest.mark.feature("T6", "P11")
@pytest.mark.parametrize("seed", often(1, [0, 1, 5, 2, 3, 4, *range(6, 20)]))
def test_tokens_are_right_whatever_the_engine(toys: Toys, seed: int) -> None:
    rng = np.random.default_rng(seed)
    settings = random_settings(rng) | {"debug_canary": True, "kv_cache": bool(rng.random() < 0.8)}
    settings |= {"snapshot_tokens": int(rng.choice([0, 16, 48])), "debug_invariants": True}
    engine = toys.engine(state=True, **settings)
    harness = EngineHarness(engine).run(random_requests(rng, 25))

    assert set(harness.reasons.values()) == {"stop", "length"}
    reuses = engine.limits.snapshot_tokens > 0
    assert (engine.stats().cached_tokens > 0) == reuses
    assert (engine.limits.num_pages[-1] > settings["max_running_requests"]) == reuses
    words = engine.canary.pools_as_words(len(engine.limits.groups) - 1)
    assert all((pool[0] == PATTERN).all() for pool in words.values()), "the dummy page was written"
    engine.close()


@pytest.mark.feature("T6")
@pytest.mark.parametrize("overlap", often(1, [True, False]))
@pytest.mark.parametrize("every", often(1, [16, 0]))
def test_a_preempted_row_has_its_state_again(toys: Toys, overlap: bool, every: int) -> None:
    sizes = {
        "max_running_requests": 6,
        "max_batch_tokens": 13,
        "num_pages": 41 if not every else 30,
    }
    sizes |= {"snapshot_tokens": every, "page_size": 4}
    engine = toys.engine(state=True, overlap=overlap, debug_canary=True, **sizes)
    harness = EngineHarness(engine).run(random_requests(np.random.default_rng(3), 30))

    assert engine.stats().preemptions > 1
    assert set(harness.reasons.values()) == {"stop", "length"}
    engine.close()


@pytest.mark.feature("G2")
@pytest.mark.parametrize("attn", often(1, ["toy-planned", "toy", "toy,toy-planned"]))
@pytest.mark.parametrize("window", often(1, [None, 7]))
def test_replayed_steps_and_what_pads_them_change_no_state(
    toys: Toys, attn: str, window: int | None
) -> None:
    sizes = {"max_running_requests": 17, "max_batch_tokens": 50, "num_pages": 120}
    engine = toys.engine(
        state=True, window=window, attn=attn, runner="rerun", debug_canary=True, **sizes
    )
    counts = Counter[str]()
    executor: Any = engine.executor
    while not hasattr(executor, "runner"):
        executor = executor.inner
    for name in ("replay_rows", "replay_prompts"):
        count_replays(executor.runner, name, counts)
    harness = EngineHarness(engine).run(random_requests(np.random.default_rng(5), 40))

    assert set(harness.reasons.values()) == {"stop", "length"}
    assert counts["replay_rows"] > 20 and counts["replay_prompts"] > 20
    assert engine.stats().preemptions
    engine.close()


@pytest.mark.parametrize(
    ("runner", "overlap"),
    often(1, [("rerun", True), ("eager", False), ("rerun", False), ("eager", True)]),
)
def test_a_failing_row_hurts_no_other_and_leaves_a_finite_state(
    toys: Toys,
    runner: str,
    overlap: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.CRITICAL)
    faults = tuple(f"nan@{step}:{row}" for step, row in ((4, 1), (9, 3), (15, 0), (28, 2)))
    sizes = {"num_pages": 60, "max_running_requests": 5, "max_batch_tokens": 23}
    engine = toys.engine(
        state=True, faults=faults, runner=runner, overlap=overlap, debug_canary=True, **sizes
    )
    left, clean = [], Buffers.zero_non_finite

    def watched(buffers: Buffers, rows: np.ndarray, tables: tuple[torch.Tensor, ...]) -> None:
        states = buffers.kv[1].state["conv"][tables[1][rows, 0].long()]
        left.append(bool(states.isnan().any()))
        clean(buffers, rows, tables)
        assert buffers.kv[1].state["conv"][tables[1][rows, 0].long()].isfinite().all()

    monkeypatch.setattr(Buffers, "zero_non_finite", watched)
    harness = EngineHarness(engine).run(random_requests(np.random.default_rng(7), 40, greedy=True))

    assert Counter(harness.reasons.values())["error"] == len(left) == 4
    assert any(left), "no state was NaN, so nothing was put to the test"
    engine.close()


@pytest.mark.parametrize(("prompt_len", "most"), [(70, 2), (1190, 37)])
def test_a_step_that_saves_states_is_replayed(toys: Toys, prompt_len: int, most: int) -> None:
    """Unless it saves more than a graph has places for."""
    prompt, said = np.arange(prompt_len) % 40, []
    sizes = {"snapshot_tokens": 32, "page_size": 16, "max_batch_tokens": 1200, "num_pages": 400}
    for runner in ("eager", "rerun"):
        engine = toys.engine(state=True, runner=runner, max_seq_len=1300, **sizes)
        for name in "ab":
            before = engine.stats()
            harness = EngineHarness(engine).run([request(name, prompt, 6)])
            said.append(harness.outputs[name])
            stats = engine.stats()
            replayed = stats.replayed_steps - before.replayed_steps
            executed = stats.executed_steps - before.executed_steps
            is_too_much = name == "a" and most > MOST_SAVED
            assert replayed == (0 if runner == "eager" else executed - is_too_much)
        # The other prompt goes on behind the last state that the first one saved.
        assert stats.cached_tokens == prompt_len // 32 * 32
        engine.close()

    assert said == [said[0]] * 4


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"snapshot_tokens": 0}, "snapshot_tokens (--snapshot-tokens) 0"),
        ({"snapshot_ratio": 0.0}, "snapshot_ratio (--snapshot-ratio) 0"),
        ({"paged_attn": "off", "num_pages": None}, "paged_attn (--paged-attn) off"),
    ],
)
def test_without_snapshots_nothing_is_reused_and_the_start_up_table_says_why(
    toys: Toys, settings: dict[str, Any], why: str
) -> None:
    engine = toys.engine(state=True, **settings)
    prompt = np.arange(40)
    for name, more in (("a", 0), ("b", 0), ("c", 5)):
        EngineHarness(engine).run([request(name, np.concatenate([prompt, np.arange(more)]), 5)])

    assert ("prefix reuse", "off", f"KV group 1 keeps a state: {why}") in engine.summary.table
    assert engine.stats().cached_tokens == engine.stats().cached_pages == 0
    engine.close()


@pytest.mark.parametrize(
    ("ratio", "states"),
    [
        (0.0, "8 pages, 16 B a page, 144 B"),
        # A tenth of 6,464 bytes and its own: 718 bytes are 44 states.
        (0.1, "52 pages, 44 snapshots among them, 16 B a page, 848 B"),
        # At most one for each page of the context.
        (0.5, "108 pages, 100 snapshots among them, 16 B a page, 1.7 KiB"),
    ],
)
def test_the_memory_plan_has_a_page_a_row_and_those_of_snapshots(
    toys: Toys, ratio: float, states: str
) -> None:
    sizes = {"num_pages": 100, "page_size": 4, "max_running_requests": 8}
    engine = toys.engine(state=True, snapshot_ratio=ratio, **sizes)

    # A key and a value of two float32 numbers, four tokens a page; two numbers, in 16 bytes.
    assert [line.strip() for line in engine.summary.memory[2:]] == [
        "KV pool   400 tokens in 2 groups",
        "full, 1 layer: 100 pages of 4, 64 B a page, 6.3 KiB",
        f"state, 1 layer: {states}",
    ]
    engine.close()


@pytest.mark.parametrize("part", ["ops", "runner"])
def test_a_part_that_knows_no_states_is_refused_by_name(
    toys: Toys, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name = {"ops": (toy_plugins, "ops"), "runner": (rerun, "spec")}[part]
    spec = getattr(module, name)()
    narrow = evolve(spec.capabilities, layouts=frozenset({LayoutKind.FULL}))
    monkeypatch.setattr(module, name, lambda: evolve(spec, capabilities=narrow))

    with pytest.raises(
        CannotRun, match=rf"--{part}\) {spec.name} .* full KV alone, and the model keeps state"
    ) as e:
        toys.engine(state=True, runner="rerun")

    assert e.value.exit_code == 5


def test_nan_in_the_dummy_page_of_a_state_ends_the_engine(toys: Toys) -> None:
    engine = toys.engine(state=True, runner="rerun", debug_canary=True, overlap=False)
    engine.submit(request("a", range(20), 30))
    for value in (1.0, np.nan):
        engine.step()
        engine.canary.buffers.kv[1].state["conv"][0, 0, 1] = value

    with pytest.raises(EngineDied, match="the dummy page of layer 1 is not finite"):
        engine.step()
