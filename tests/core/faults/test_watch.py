"""What may not be written is watched, and what may not be left behind is looked for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import patience
import pytest
import torch
from attrs import evolve
from often import often
from toy_engine import EngineHarness, Toys, random_requests, random_settings, request

from headstock.debug.canary import PATTERN, Canary
from headstock.engine.engine import Engine
from headstock.engine.loop import Loop
from headstock.errors import EngineDied, PluginBroken
from headstock.scheduler import State
from headstock.spi import CacheStats

PROMPT = np.arange(20)


def touch(engine: Any, page: int, value: float = 1.0) -> None:
    """Write one number to a page."""
    engine.canary.buffers.pools[0][page, 1, 2, 0, 1] = value


@pytest.mark.parametrize("seed", often(2, range(8)))
def test_no_step_writes_to_a_free_page(toys: Toys, seed: int) -> None:
    rng = np.random.default_rng(seed)
    engine = toys.engine(debug_canary=True, **random_settings(rng))
    EngineHarness(engine).run(random_requests(rng, 25))
    pools = engine.canary.pools_as_words(0)
    engine.close()

    assert (pools[0][0] == PATTERN).all(), "the dummy page was written"


@pytest.mark.parametrize("seed", often(1, range(3)))
def test_the_padding_of_a_replayed_step_writes_to_no_page_of_anybody(toys: Toys, seed: int) -> None:
    sizes = {"max_running_requests": 13, "max_batch_tokens": 40, "num_pages": 200}
    engine = toys.engine(runner="rerun", debug_canary=True, cache_type="naive", **sizes)
    harness = EngineHarness(engine).run(
        random_requests(np.random.default_rng(seed), 40, greedy=True)
    )
    engine.close()

    assert set(harness.reasons.values()) == {"stop", "length"}, (
        "a request failed that nothing was wrong with"
    )


@pytest.mark.parametrize(
    ("page", "message"), [(90, "page 90 of layer 0"), (0, "the dummy page of layer 0")]
)
@pytest.mark.parametrize("overlap", [True, False])
def test_a_stray_write_ends_the_engine_before_the_next_step(
    toys: Toys, page: int, message: str, overlap: bool
) -> None:
    engine = toys.engine(debug_canary=True, overlap=overlap)
    engine.submit(request("a", PROMPT, 30))
    for _ in range(5):
        engine.step()
    touch(engine, page)
    with pytest.raises(EngineDied, match=f"{message} had been written though it was free"):
        step_on(engine)
    engine.close()


def test_everyone_is_told_of_a_stray_write(toys: Toys) -> None:
    loop = Loop(toys.engine(debug_canary=True))
    updates: list[Any] = []

    def tell(update: Any) -> None:
        updates.append(update)
        touch(loop.engine, 77)

    loop.submit(request("a", PROMPT, 30), tell)
    loop.thread.join(patience.seconds)
    loop.close()
    loop.engine.close()

    assert updates[-1].finish_reason == "error" and "page 77" in updates[-1].error


def test_padding_may_write_the_dummy_page_but_no_nan(toys: Toys) -> None:
    engine = toys.engine(overlap=False, num_pages=50)
    engine.executor = engine.canary = Canary(
        engine.executor, engine.executor.steps.buffers, engine.limits.groups, padded=True
    )
    engine.submit(request("a", PROMPT, 30))
    for _ in range(4):
        engine.step()
    touch(engine, 0, 5.0)
    engine.step()
    touch(engine, 0, torch.nan)
    with pytest.raises(EngineDied, match="the dummy page of layer 0 is not finite"):
        engine.step()
    engine.close()


def step_on(engine: Engine) -> None:
    """Step to the end."""
    while engine.has_work:
        engine.step()


LEFT_BEHIND: dict[str, Callable[[State], State]] = {
    "row 2 still counts something": lambda state: evolve(
        state, row_counters=put(state.row_counters, (5, 2), 1)
    ),
    "page 7 is still held, one of 1": lambda state: evolve(state, refs=(put(state.refs[0], 7, 1),)),
    "the free pages are miscounted": lambda state: evolve(state, num_free=[state.num_free[0] - 1]),
    "a free page is not in the pool": lambda state: evolve(
        state, free=[[np.array([200]), *state.free[0][1:]]]
    ),
    "a page is free twice": lambda state: evolve(
        state, free=[[*state.free[0], state.free[0][0][:1]]], num_free=[state.num_free[0] + 1]
    ),
    "95 free and 4 cached pages are not the 100": lambda state: evolve(
        state,
        free=[[*state.free[0][:-1], state.free[0][-1][:-1]]],
        num_free=[state.num_free[0] - 1],
    ),
}


def put(array: np.ndarray, where: Any, value: int) -> np.ndarray:
    """A copy with one other number in it."""
    copy = array.copy()
    copy[where] = value
    return copy


@pytest.mark.parametrize("message", LEFT_BEHIND)
def test_an_idle_engine_that_kept_something_says_what(toys: Toys, message: str) -> None:
    engine = toys.engine(debug_invariants=False)
    EngineHarness(engine).run([request("a", PROMPT[:18], 2)])
    broken_state = LEFT_BEHIND[message](engine.state)
    if "not in the pool" in message:
        broken_state = evolve(
            broken_state, num_free=[sum(len(part) for part in broken_state.free[0])]
        )
    engine.state = broken_state
    engine.abort("nobody")
    with pytest.raises(EngineDied, match=f"idle, yet .*{message}.*headstock replay"):
        step_on(engine)
    engine.close()


def test_an_index_that_keeps_a_hold_is_noticed_when_idle(toys: Toys) -> None:
    engine = toys.engine(debug_invariants=False)
    EngineHarness(engine).run([request("a", PROMPT, 2)])
    policy, index = engine.limits.policy, engine.state.index
    policy.hold(index, policy.match_prefix(index, PROMPT.astype(np.int32), "").handle)
    engine.abort("nobody")
    with pytest.raises(PluginBroken, match=r"'radix'.*idle, yet group 0: 5 of 5 indexed pages"):
        engine.step()
    engine.close()


def lost() -> None:
    raise KeyError("lost")


@pytest.mark.parametrize(
    ("stats", "said"),
    [
        (lambda self, index: lost(), "raised KeyError: 'lost' in stats"),
        (lambda self, index: sys.exit(0), "raised SystemExit: 0 in stats"),
        (lambda self, index: None, "answered stats: expected a CacheStats .* got None"),
        (lambda self, index: CacheStats(pages=(), held=()), "answered stats: .* got CacheStats"),
        (lambda self, index: CacheStats(pages=("5",), held=(0,)), "expected a CacheStats with"),
    ],
)
def test_a_policy_whose_stats_fail_is_named(
    toys: Toys, monkeypatch: pytest.MonkeyPatch, stats: Any, said: str
) -> None:
    engine = toys.engine(debug_invariants=False)
    EngineHarness(engine).run([request("a", PROMPT, 2)])
    monkeypatch.setattr(type(engine.limits.policy), "stats", stats)
    engine.abort("nobody")
    with pytest.raises(PluginBroken, match=f"the cache plugin 'radix' .*{said}.*headstock replay"):
        engine.step()
    engine.close()


def test_an_invariant_that_breaks_in_a_step_is_named(toys: Toys) -> None:
    engine = toys.engine(overlap=False)
    engine.submit(request("a", PROMPT, 30))
    engine.step()
    engine.step()
    engine.state.free[0].append(engine.state.pages[0][0][:1])
    with pytest.raises(
        EngineDied, match="the scheduler contradicts itself: group 0: the free pages are miscounted"
    ):
        engine.step()
    engine.close()
