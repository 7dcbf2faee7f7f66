"""Failures that other servers have had, each as the workload that showed it
(docs/reliability.md).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import patience
import pytest
from attrs import evolve
from often import often
from toy_engine import EngineHarness, Toys, random_requests, request
from toy_text import toy_llm
from toy_workloads import limits, prompt
from toy_workloads import request as scheduled

from headstock import LLM, RequestError, SamplingParams
from headstock.config import EngineConfig
from headstock.engine.engine import Engine
from headstock.outputs import Update
from headstock.scheduler import Request
from headstock.scheduler.invariants import check_state
from headstock_conformance.scheduler.toy_device import alone
from headstock_conformance.scheduler.toy_schedule import Drive

SEED = 17
RNG = np.random.default_rng(SEED)


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    """The demo model with pages of 16, prompts computed one page a step.

    A product of more rows may be summed in another order. So a step of a hit has the rows, and the
    context, that the step of the same tokens has without one, and the numbers are equal to the bit.
    """
    sizes = {"num_pages": 200, "page_size": 16, "max_seq_len": 512, "max_running_requests": 16}
    with LLM("demo", **sizes, max_batch_tokens=16) as llm:
        yield llm


def scores(llm: LLM, prompts: list[list[int]]) -> list[list[tuple[int, float]]]:
    """Each prompt's greedy tokens with their log-probabilities, one prompt after the other."""
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=0, ignore_eos=True)
    outputs = [
        llm.generate({"prompt_token_ids": tokens}, params)[0].outputs[0] for tokens in prompts
    ]
    return [
        [
            (token, table[token].logprob)
            for token, table in zip(output.token_ids, output.logprobs or (), strict=True)
        ]
        for output in outputs
    ]


def test_a_hit_changes_no_score_whatever_part_of_a_page_is_left(demo: LLM) -> None:
    head = RNG.integers(5, 500, 40).tolist()
    prompts = [
        head[: 16 + 8 * (tail % 3)] + RNG.integers(5, 500, tail).tolist() for tail in range(1, 16)
    ]
    demo._session.loop.reset_prefix_cache()
    scores(demo, [head])
    before = demo._session.engine.stats().cached_tokens
    hit = scores(demo, prompts)
    assert demo._session.engine.stats().cached_tokens - before >= 16 * len(prompts)
    fresh = []
    for tokens in prompts:
        demo._session.loop.reset_prefix_cache()
        fresh += scores(demo, [tokens])

    assert all(len(item) == 4 for item in hit)
    assert hit == fresh, "a hit changes what is said"


@pytest.mark.full
def test_two_thousand_prompts_through_a_small_pool_wait_no_longer_at_the_end() -> None:
    bounds = limits(num_pages=60, max_rows=4, max_batch_tokens=64, check=False)
    drive, waits = Drive(bounds), []
    for number in range(2_000):
        came = len(drive.plans)
        drive.submit(scheduled(str(number), prompt(RNG, 12), 2))
        while not drive.outputs[str(number)]:
            drive.step()
            assert len(drive.plans) - came < 100, f"request {number} waits for ever"
        waits.append(len(drive.plans) - came)
        check_state(drive.state, drive.limits)
    drive.drain(20)

    assert not np.count_nonzero(drive.state.refs[0])
    assert max(waits[-500:]) <= max(waits[:500]) <= 4


@pytest.fixture
def engine() -> Iterator[Engine]:
    """The demo model, checked at every step."""
    built = Engine(EngineConfig(num_pages=256, max_running_requests=16, debug_invariants=True))
    yield built
    built.close()


def asking(
    name: str, length: int, max_tokens: int = 8, stop_ids: tuple[int, ...] = (), **params: Any
) -> Request:
    """A request for the demo model."""
    # so that EngineHarness does not judge it
    settings = SamplingParams(**({"temperature": 0.0, "logprobs": 0} | params))
    tokens = np.random.default_rng(length).integers(5, 500, length)
    scored = settings.prompt_logprobs is not None
    return request(
        name, tokens, max_tokens, params=settings, stop_ids=stop_ids, prompt_logprobs=scored
    )


def test_the_largest_token_id_a_neighbour_may_name_changes_nothing_and_one_more_is_refused(
    demo: LLM, engine: Engine
) -> None:
    vocab = engine.model.vocab
    victim = asking("victim", 20, 12)
    alone_says = EngineHarness(engine).run([victim]).outputs["victim"]
    extremes = [
        {"logit_bias": {vocab - 1: 100.0}},
        {"allowed_token_ids": (vocab - 1,)},
        {"logit_bias": {0: -100.0}},
    ]
    attackers = [asking(str(i), 9 + i, 12, **params) for i, params in enumerate(extremes)]
    beside = EngineHarness(engine).run([attackers[0], victim, *attackers[1:]]).outputs

    assert beside["victim"] == alone_says, "tokens depend on neighbours"
    assert beside["0"] == beside["1"] == [vocab - 1] * 12
    for name, ids in (
        ("logit_bias", {vocab: 1.0}),
        ("allowed_token_ids", (vocab,)),
        ("stop_token_ids", [vocab]),
    ):
        with pytest.raises(RequestError, match=name):
            demo.generate("x", SamplingParams(**{name: ids}))


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "presence": {"presence_penalty": 1.5},
    "repetition": {"repetition_penalty": 1.3},
    "bias": {"logit_bias": {7: 3.0}},
    "min_p": {"temperature": 1.0, "min_p": 0.2, "seed": 3},
    "nucleus": {"temperature": 1.0, "top_k": 9, "top_p": 0.5, "seed": 4},
    "logprobs": {"logprobs": 4},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "allowed": {"allowed_token_ids": (9, 10)},
    "stop": {"stop_ids": tuple(range(5, 40))},
}


def test_each_pair_of_features_in_one_batch_says_what_each_says_alone(engine: Engine) -> None:
    one = {
        kind: asking(kind, 10 + i, 4, **params) for i, (kind, params) in enumerate(KINDS.items())
    }
    solo = {kind: EngineHarness(engine).run([item]).outputs[kind] for kind, item in one.items()}
    for a, b in itertools.combinations(KINDS, 2):
        assert EngineHarness(engine).run([one[a], one[b]]).outputs == {a: solo[a], b: solo[b]}, (
            f"{a} beside {b}"
        )


@pytest.mark.parametrize("rows", often(1, [4, 1]))
def test_chunks_of_four_tokens_under_overlap_with_penalties_and_min_tokens(
    toys: Toys, rows: int
) -> None:
    often = {"max_tokens": 12, "min_tokens": 6, "stop_ids": tuple(range(20))}  # of fifty ids
    requests = [
        evolve(one, id=str(length), prompt=RNG.integers(0, 50, length).astype(np.int32), **often)
        for length, one in zip((1, 3, 4, 5, 12, 19, 33, 40), random_requests(RNG, 8), strict=True)
    ]
    outputs = []
    for overlap in (True, False):
        engine = toys.engine(
            overlap=overlap, max_batch_tokens=4, max_running_requests=rows, page_size=4
        )
        outputs.append(EngineHarness(engine).run(requests).outputs)
        engine.close()

    assert outputs[0] == outputs[1]
    for token_ids in outputs[0].values():
        assert len(token_ids) >= 6 and min(token_ids[:6]) >= 20, (
            f"a stop id before six tokens are out: {token_ids}"
        )
    assert {len(token_ids) for token_ids in outputs[0].values()} != {12}, (
        "no stop id came after them"
    )


def test_streams_that_are_left_at_any_moment_leave_no_page_held(toys: Toys) -> None:
    with toy_llm(toys.folder, num_pages=600, max_running_requests=6, max_seq_len=2000) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True)
        reasons: list[str] = []
        emit = llm._session.loop._emit

        def note_ends(updates: Sequence[Update]) -> None:
            reasons.extend(each.finish_reason for each in updates if each.finish_reason)
            emit(updates)

        llm._session.loop._emit = note_ends

        def leave(number: int) -> None:
            stream = llm.stream({"prompt_token_ids": [number % 7, *range(number % 40)]}, params)
            for _ in range(number % 21):
                next(stream)
            stream.close()  # type: ignore[attr-defined]

        readers = [threading.Thread(target=leave, args=(number,)) for number in range(50)]
        for reader in readers:
            reader.start()
        deadline = time.monotonic() + patience.seconds
        for reader in readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        while llm._session.engine.has_work and time.monotonic() < deadline:
            time.sleep(0.01)
        stats = llm._session.engine.stats()

        assert stats.running == stats.waiting == 0, "whoever left runs on, or took the engine along"
        assert "error" not in reasons, "whoever left took the engine along"
        # A reader may sleep so long on a busy machine that its request ends before it leaves.
        assert reasons.count("abort") > 25, "whoever left runs on"
        assert stats.free_pages + stats.cached_pages == stats.total_pages
        assert not llm._session.engine.output_tracker.unadmitted_pages and not np.count_nonzero(
            llm._session.engine.state.refs[0]
        )


@pytest.mark.parametrize("scheduler", ["mixed", "prefill-first", "decode-first", "equal-length"])
def test_a_head_that_needs_the_whole_pool_is_served_and_so_is_who_waits_behind_it(
    scheduler: str,
) -> None:
    bounds = limits(num_pages=12, max_rows=4, scheduler=scheduler)
    early = [scheduled(f"early {i}", prompt(RNG, 8), 12) for i in range(3)]
    # 12 pages of 4 at once: the last token is never computed
    big = scheduled("big", prompt(RNG, 48), 1)
    late = [scheduled(f"late {i}", prompt(RNG, 5), 3) for i in range(6)]
    drive = Drive(bounds)
    for one in (*early, big, *late):
        drive.submit(one)
        drive.step()
    drive.drain(150)

    assert drive.outputs == {one.id: alone(one) for one in (*early, big, *late)}
