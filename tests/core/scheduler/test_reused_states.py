"""How much of earlier work a model with states reuses, by the scheduler alone."""

from __future__ import annotations

import numpy as np
import pytest
from toy_workloads import FULL, STATE, limits

from headstock.scheduler import Arrived, Ended, Event, Request, Sampled, State, initial_state, step
from headstock_radix_cache.policy import RadixCache

PAGE, ALIGNMENT, EVERY = 16, 64, 1024


def make_state() -> State:
    """An engine of 16 rows with 40 snapshots more, and pages for 100,000 tokens."""
    groups = (FULL, STATE)
    return initial_state(
        limits(
            groups=groups,
            page_size=PAGE,
            max_rows=16,
            max_batch_tokens=8192,
            max_len=20_000,
            num_pages=(6250, 16 + 40),
            policy=RadixCache(PAGE, groups),
            alignment=ALIGNMENT,
            snapshot_tokens=EVERY,
            overlap=True,
            check=False,
        )
    )


def run(state: State, requests: list[Request], rng: np.random.Generator) -> dict[str, Ended]:
    """Run requests to their ends, with random tokens that come a step late."""
    events: list[Event] = [Arrived(request) for request in requests]
    ended: dict[str, Ended] = {}
    sampled: Sampled | None = None
    while len(ended) < len(requests):
        plan = step(state, events if sampled is None else [sampled, *events])
        ended |= {each.id: each for each in state.ended}
        rows = np.flatnonzero(plan.samples)
        tokens = rng.integers(0, 50_000, len(rows)).astype(np.int32)
        events, sampled = [], Sampled(plan.rows[rows], plan.admission_ids[rows], None, tokens)
    return ended


def make_request(id: str, *parts: np.ndarray, most: int) -> Request:
    """A request for these tokens."""
    return Request(id=id, prompt=np.concatenate(parts).astype(np.int32), max_tokens=most)


@pytest.mark.feature("V11")
def test_a_conversation_computes_at_most_63_tokens_of_its_turns_again() -> None:
    rng, state = np.random.default_rng(0), make_state()
    talks = {f"{user}": rng.integers(0, 50_000, int(rng.integers(80, 2000))) for user in range(10)}
    seen = dict.fromkeys(talks, 0)
    for turn in range(4):
        asked = [
            make_request(user, talk, most=int(rng.integers(2, 150))) for user, talk in talks.items()
        ]
        for user, ended in run(state, asked, rng).items():
            assert seen[user] - ended.cached < ALIGNMENT, (turn, user)
            # The last token of an answer is not computed.
            seen[user] = len(ended.tokens) - 1
            more = rng.integers(0, 50_000, int(rng.integers(20, 300)))
            talks[user] = np.concatenate([ended.tokens, more])


@pytest.mark.feature("V11")
@pytest.mark.parametrize("at_once", [False, True])
def test_all_but_1024_tokens_of_what_prompts_share_are_reused(at_once: bool) -> None:
    rng, state = np.random.default_rng(1), make_state()
    shared = rng.integers(0, 50_000, 3500)
    asked = [make_request(f"{n}", shared, rng.integers(0, 50_000, 200), most=20) for n in range(12)]
    parts = [asked] if at_once else [[one] for one in asked]
    cached = [each.cached for part in parts for each in run(state, part, rng).values()]

    assert sorted(cached)[0] == 0 and sorted(cached)[1] > len(shared) - EVERY
    # The second prompt leaves a state where it parts from the first.
    assert at_once or cached[2:] == [len(shared) // ALIGNMENT * ALIGNMENT] * 10
