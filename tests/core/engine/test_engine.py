"""Requests through the real engine, on the demo model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import evolve

from headstock import SamplingParams
from headstock.config import EngineConfig
from headstock.engine.engine import Engine
from headstock.errors import CapacityError, RequestError
from headstock.scheduler import Request
from headstock.scheduler.invariants import check_state

from .demo import drain, request, tokens


@pytest.mark.feature("I12", "I13")
def test_every_request_ends_once_and_pages_come_back(engine: Engine) -> None:
    by_request = drain(engine, *(request(str(i), 5 + i, 1 + i % 7) for i in range(40)))

    for i in range(40):
        assert len(tokens(by_request[str(i)])) == 1 + i % 7
        assert [update.finish_reason for update in by_request[str(i)]][-1] == "length"
        assert all(update.finish_reason is None for update in by_request[str(i)][:-1])
    check_state(engine.state, engine.limits)
    stats = engine.stats()
    assert stats.running == stats.waiting == 0 and stats.free_pages + stats.cached_pages == 256
    assert stats.output_tokens == sum(1 + i % 7 for i in range(40))


@pytest.mark.feature("H12")
def test_temperature_0_is_deterministic_and_seeds_repeat(engine: Engine) -> None:
    one = request("a", 30, 12)
    warm = evolve(one, params=SamplingParams(temperature=2.0, seed=7))
    first = drain(engine, one, evolve(warm, id="b"))
    again = drain(engine, *(request(f"n{i}", 11, 9) for i in range(5)), one, evolve(warm, id="b"))
    other = drain(engine, evolve(one, id="c", params=SamplingParams(temperature=2.0, seed=8)))

    assert tokens(first["a"]) == tokens(again["a"]) and tokens(first["b"]) == tokens(again["b"])
    assert tokens(other["c"]) != tokens(first["b"])


def test_features_in_one_batch_do_not_touch_neighbours(engine: Engine) -> None:
    plain = request("plain", 25, 10)
    alone = tokens(drain(engine, plain)["plain"])
    kinds = [
        {"presence_penalty": 1.5}, {"frequency_penalty": 1.0}, {"repetition_penalty": 1.3},
        {"logit_bias": {7: 50.0}},
        {"temperature": 1.0, "min_p": 0.2, "seed": 3}, {"temperature": 1.0, "top_k": 3,
        "top_p": 0.5, "seed": 4},
        {"logprobs": 4}, {"prompt_logprobs": 2}, {"allowed_token_ids": (9, 10)},
    ]  # fmt: skip
    others = [request(str(i), 10 + i, 12, **kind) for i, kind in enumerate(kinds)]
    solo = {one.id: tokens(drain(engine, one)[one.id]) for one in others}
    by_request = drain(engine, *others, plain)

    assert tokens(by_request["plain"]) == alone
    assert {one.id: tokens(by_request[one.id]) for one in others} == solo
    assert set(solo["3"]) == {7} and set(solo["8"]) <= {9, 10}


def test_min_tokens_bans_stop_ids(engine: Engine) -> None:
    one = request("a", 20, 30)
    output = tokens(drain(engine, one)["a"])
    stopped = drain(engine, evolve(one, id="b", stop_ids=(output[0],)))["b"]
    later = drain(engine, evolve(one, id="c", stop_ids=(output[0],), min_tokens=6))["c"]

    assert tokens(stopped) == output[:1]
    assert (stopped[-1].finish_reason, stopped[-1].stop_token) == ("stop", output[0])
    assert output[0] not in tokens(later)[:6] and len(tokens(later)) > 6


def test_logprobs_agree_with_prompt_logprobs_of_the_same_text(engine: Engine) -> None:
    one = request("a", 20, 6, logprobs=3)
    updates = drain(engine, one)["a"]
    output = tokens(updates)
    scores = [score for update in updates for score in update.logprobs or ()]
    whole = np.concatenate([one.prompt, output]).astype(np.int32)
    sampling_params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    echo = Request(id="b", prompt=whole, max_tokens=1, params=sampling_params, prompt_logprobs=True)
    table = drain(engine, echo)["b"][0].prompt_logprobs

    assert [score.token for score in scores] == output and all(
        len(score.top) == 3 for score in scores
    )
    assert all(score.top[0] == (score.token, score.logprob) for score in scores)
    assert table is not None and table[0] is None and len(table) == 26
    for score, other in zip(scores, table[20:], strict=True):
        assert other is not None and other.token == score.token
        assert other.logprob == pytest.approx(score.logprob, abs=1e-4)


@pytest.mark.feature("S22", "H1")
def test_bad_requests_are_refused_at_the_door(engine: Engine) -> None:
    with pytest.raises(CapacityError, match="empty"):
        engine.submit(request("a", 0))
    with pytest.raises(CapacityError, match=r"4096 tokens .*a sequence may have 4096"):
        engine.submit(request("b", 4096))
    with pytest.raises(RequestError, match="token 99999 is not in the vocabulary"):
        engine.submit(evolve(request("c"), prompt=np.array([99999], np.int32)))
    engine.submit(request("d"))
    with pytest.raises(RequestError, match="in use"):
        engine.submit(request("d"))


@pytest.mark.feature("H16")
def test_reject_refuses_under_pressure_and_accepts_again() -> None:
    engine = Engine(
        EngineConfig(num_pages=20, on_pressure="reject", memory_threshold=0.5, cache_type="naive")
    )
    engine.submit(request("a", 150, 20))
    with pytest.raises(CapacityError, match=r"--memory-threshold\) is 0\.5"):
        engine.submit(request("b", 10, 5))
    while engine.has_work:
        engine.step()
    by_request = drain(engine, request("b", 10, 5))

    assert len(tokens(by_request["b"])) == 5
    engine.close()


def test_the_smallest_top_p_keeps_the_best_token(engine: Engine) -> None:
    one = request("a", 20, 6)
    narrow = evolve(one, id="b", params=SamplingParams(temperature=1.5, top_p=1e-300, seed=1))

    assert tokens(drain(engine, narrow)["b"]) == tokens(drain(engine, one)["a"])


@pytest.mark.parametrize("ids", [{"logit_bias": {768: 1.0}}, {"allowed_token_ids": (768,)}])
def test_ids_outside_the_vocabulary_are_refused_at_submission(
    engine: Engine, ids: dict[str, Any]
) -> None:
    engine.submit(request("victim", 10, 5))
    with pytest.raises(
        RequestError, match=f"{next(iter(ids))}: token 768 is not in the vocabulary of 768"
    ):
        engine.submit(request("attacker", 10, 5, **ids))
    while engine.has_work:
        engine.step()

    assert engine.stats().failed == 0
