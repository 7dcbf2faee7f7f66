"""Who hears of what, and when: requests that are told of every token, and those that are told at
their end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from often import often
from toy_engine import GREEDY, EngineHarness, Toys, expected, installed, random_requests, request

from headstock import SamplingParams
from headstock.engine.engine import Engine
from headstock.engine.loop import Loop
from headstock.errors import CapacityError, RequestError
from headstock.outputs import Update
from headstock.scheduler import Request

SCARCE = {"num_pages": 45, "max_running_requests": 6, "max_batch_tokens": 24}
PROMPT = list(range(5, 17))


@pytest.fixture
def toys(tmp_path: Path) -> Iterator[Toys]:
    """The toy model and its parts."""
    with installed(tmp_path) as toys_folder:
        yield toys_folder


def scored(requests: Sequence[Request]) -> list[Request]:
    """The same requests, of which some want log-probabilities of the output, the prompt or both."""
    extras: tuple[dict[str, Any], ...] = (
        {},
        {"logprobs": 2},
        {"prompt_logprobs": 1},
        {"logprobs": 0},
    )
    pairs = [(one, extras[i % 4]) for i, one in enumerate(requests)]
    return [
        evolve(one, params=evolve(one.params, **extra), prompt_logprobs="prompt_logprobs" in extra)
        for one, extra in pairs
    ]


def collect_updates(
    engine: Engine, requests: Sequence[Request], *, stream_tokens: bool, aborts: int = 6
) -> dict[str, list[Update]]:
    """The updates of each request until all have ended; in every so many-th step one is aborted."""
    updates_of: dict[str, list[Update]] = {one.id: [] for one in requests}
    for one in requests:
        engine.submit(one, stream_tokens=stream_tokens)
    steps = 0
    while engine.has_work:
        steps += 1
        if steps % aborts == 0:
            engine.abort(requests[7 * (steps // aborts) % len(requests)].id)
        for update in engine.step():
            updates_of[update.id].append(update)
    return updates_of


def whole(updates: Sequence[Update]) -> Update:
    """All updates of a request, as one."""
    first = next((item for item in updates if item.tokens), updates[-1])
    return evolve(
        updates[-1],
        tokens=tuple(token for item in updates for token in item.tokens),
        logprobs=tuple(entry for item in updates for entry in item.logprobs or ()),
        cached_tokens=first.cached_tokens,
        prompt_logprobs=first.prompt_logprobs,
    )


@pytest.mark.feature("I19")
@pytest.mark.parametrize("overlap", often(1, [True, False]), ids=["overlap", "told at once"])
@pytest.mark.parametrize("seed", often(1, range(3)))
def test_news_at_the_end_says_what_news_of_each_token_says(
    toys: Toys, seed: int, overlap: bool
) -> None:
    requests = scored(random_requests(np.random.default_rng(seed), 40))
    runs = []
    for stream_tokens in (True, False):
        engine = toys.engine(overlap=overlap, **SCARCE)
        runs.append(collect_updates(engine, requests, stream_tokens=stream_tokens))
        output_tracker = engine.output_tracker
        assert (
            engine.stats().preemptions
            and not output_tracker.requests
            and not output_tracker.by_admission_id
            and not output_tracker.awaiting_token
        )
        engine.close()
    each_token, at_the_end = runs

    assert max(map(len, each_token.values())) > 20
    assert all(
        len(updates) == 1 or (len(updates) == 2 and updates[0].tokens)
        for updates in at_the_end.values()
    )
    assert {name: whole(updates) for name, updates in each_token.items()} == {
        name: whole(updates) for name, updates in at_the_end.items()
    }
    assert {"abort", "length", "stop"} <= {
        updates[-1].finish_reason for updates in at_the_end.values()
    }


@pytest.mark.feature("T12")
def test_held_pages_are_counted_without_a_look_at_each(toys: Toys) -> None:
    harness = EngineHarness(toys.engine(**SCARCE))
    most = 0
    for one in random_requests(np.random.default_rng(8), 30, greedy=True):
        harness.submit(one)
    while harness.engine.has_work:
        harness.step()
        most = max(most, int(np.count_nonzero(harness.engine.state.refs[0])))

    assert most == harness.engine.stats().peak_held_pages
    harness.engine.close()


def test_the_time_without_a_row_is_told_with_the_first_token(toys: Toys) -> None:
    engine = toys.engine(max_running_requests=1)
    began = time.monotonic()
    updates_of = collect_updates(
        engine, [request(name, PROMPT, 30) for name in "ab"], stream_tokens=True, aborts=10**9
    )
    passed = time.monotonic() - began
    first, second = (updates[0].queue_seconds for updates in updates_of.values())

    assert first is not None and second is not None
    assert 0 <= first < second < passed, "b waits while a runs"
    later = [each for updates in updates_of.values() for each in updates[1:]]
    assert {each.queue_seconds for each in later} == {None}
    stats = engine.stats()
    assert 60 <= stats.executed_steps <= stats.steps and stats.replayed_steps == 0
    engine.close()


def test_what_a_preempted_request_finds_of_its_own_is_not_counted_as_cached(toys: Toys) -> None:
    engine, rng = toys.engine(**SCARCE), np.random.default_rng(3)
    # no two begin alike
    requests = [request(str(i), [i, *rng.integers(0, 50, 11)], 60) for i in range(12)]
    updates_of = collect_updates(engine, requests, stream_tokens=True, aborts=10**9)
    stats = engine.stats()

    assert stats.preemptions, "no request was preempted"
    assert (stats.cached_tokens, stats.prompt_tokens) == (0, 12 * 12), "cached tokens"
    assert stats.output_tokens == sum(len(whole(updates).tokens) for updates in updates_of.values())
    assert {whole(updates).cached_tokens for updates in updates_of.values()} == {0}
    engine.close()


@pytest.mark.parametrize("stream_tokens", [True, False])
def test_a_loop_that_closes_tells_what_is_known_so_far(toys: Toys, stream_tokens: bool) -> None:
    loop = Loop(toys.engine(max_running_requests=1, faults=("slow@12:0.5",)))
    updates_of: dict[str, list[Update]] = {"running": [], "waiting": []}
    ask = request("running", PROMPT, 100)
    loop.submit(ask, updates_of["running"].append, stream_tokens=stream_tokens)
    loop.submit(
        evolve(ask, id="waiting"), updates_of["waiting"].append, stream_tokens=stream_tokens
    )
    while loop.engine.state.num_steps < 10 and loop.thread.is_alive():
        loop.thread.join(0.01)
    loop.close()
    loop.engine.close()
    tokens = [token for update in updates_of["running"] for token in update.tokens]

    assert len(tokens) > 5 and tokens == expected(ask)[: len(tokens)]
    assert [updates_of[name][-1].finish_reason for name in updates_of] == ["abort", "abort"]
    assert [update.tokens for update in updates_of["waiting"]] == [()]


def deaf(update: Update) -> None:
    """A sink that cannot hear of an end."""
    if update.finish_reason is not None:
        raise ValueError("no")


@pytest.mark.parametrize("faults", [(), ("slow@1:0.5", "schedule@4")], ids=["closed", "died"])
def test_the_end_of_an_engine_reaches_everyone_though_a_sink_raises(
    toys: Toys, faults: tuple[str, ...]
) -> None:
    loop = Loop(toys.engine(faults=faults))
    seen: list[Update] = []
    for name, sink in (("a", deaf), ("b", seen.append)):
        loop.submit(request(name, PROMPT, 100), sink, stream_tokens=False)
    loop.thread.join(10 if faults else 0)
    loop.close()
    loop.engine.close()

    assert seen[-1].finish_reason == ("error" if faults else "abort")


def test_a_plugin_that_exits_fails_its_step_and_the_engine_answers(
    toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = toys.engine(overlap=False)
    execute = engine.executor.execute

    def leave(*_: Any) -> None:
        monkeypatch.setattr(engine.executor, "execute", execute)
        raise SystemExit(3)

    monkeypatch.setattr(engine.executor, "execute", leave)
    harness = EngineHarness(engine)
    harness.submit(request("a", PROMPT))
    updates = [update for _ in range(3) for update in engine.step()]
    assert [update.finish_reason for update in updates] == ["error"]
    assert "SystemExit: 3" in str(updates[0].error)

    harness = EngineHarness(engine)
    assert harness.run([request("b", PROMPT)]).reasons == {"b": "length"}
    engine.close()


def test_only_asked_for_alternatives_are_told(toys: Toys) -> None:
    engine = toys.engine()
    params = [SamplingParams(temperature=0.0, logprobs=most) for most in (0, 3)]
    pairs = [request(str(i), PROMPT, 3, params=item) for i, item in enumerate([*params, GREEDY])]
    updates_of = {
        name: whole(updates)
        for name, updates in collect_updates(engine, pairs, stream_tokens=False, aborts=99).items()
    }
    engine.close()

    assert [{len(entry.top) for entry in updates_of[name].logprobs or ()} for name in "012"] == [
        {0},
        {3},
        set(),
    ]
    assert [len(updates_of[name].logprobs or ()) for name in "012"] == [3, 3, 0]


def test_an_abort_of_nobody_does_not_concern_who_takes_that_name_later(toys: Toys) -> None:
    harness = EngineHarness(toys.engine(on_pressure="reject", memory_threshold=0.02, num_pages=40))
    harness.engine.abort("a")
    ask = request("a", PROMPT, 5)
    harness.submit(ask)
    with pytest.raises(RequestError, match="in use"):
        harness.engine.submit(ask)
    with pytest.raises(CapacityError, match="memory_threshold"):  # of pages that "a" will need
        harness.engine.submit(evolve(ask, id="b"))
    harness.drain()
    harness.engine.close()

    assert harness.reasons == {"a": "length"} and harness.outputs["a"] == expected(ask)
