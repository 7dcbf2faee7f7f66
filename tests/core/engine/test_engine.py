"""The engine on the demo model: what it promises whatever the sizes, the neighbours and the faults."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from headstock import SamplingParams, registry
from headstock.config import EngineConfig
from headstock.engine.build import check_options
from headstock.engine.engine import Engine
from headstock.engine.loop import Loop
from headstock.engine.update import Update
from headstock.errors import CannotRun, CapacityError, EngineDied, ModelError, PluginBroken, RequestError, UsageError
from headstock.schedule import Request
from headstock.schedule.check import check
from headstock.spi import Batch, Runner, Sample

SEED = 5
RNG = np.random.default_rng(SEED)
SMALL = {"num_pages": 256, "max_running_requests": 16}


def request(name: str, length: int = 20, max_tokens: int = 8, **params: Any) -> Request:
    """A request of random tokens."""
    settings = SamplingParams(**({"temperature": 0.0} | params))
    prompt = RNG.integers(5, 500, length).astype(np.int32)
    return Request(
        id=name,
        prompt=prompt,
        max_tokens=max_tokens,
        params=settings,
        prompt_logprobs=settings.prompt_logprobs is not None,
    )


@pytest.fixture
def engine() -> Iterator[Engine]:
    """A small engine that checks every step."""
    made = Engine(EngineConfig(**SMALL, debug_invariants=True, overlap=False))
    yield made
    made.close()


def drain(engine: Engine, *requests: Request) -> dict[str, list[Update]]:
    """Submit, run to the end, and sort the news by request."""
    for one in requests:
        engine.submit(one)
    news: dict[str, list[Update]] = {one.id: [] for one in requests}
    while engine.has_work:
        for update in engine.step():
            news[update.id].append(update)
    return news


def tokens(updates: list[Update]) -> list[int]:
    """All output tokens."""
    return [token for update in updates for token in update.tokens]


def test_I12_I13_every_request_ends_once_and_pages_come_back(engine: Engine) -> None:
    news = drain(engine, *(request(str(i), 5 + i, 1 + i % 7) for i in range(40)))

    for i in range(40):
        assert len(tokens(news[str(i)])) == 1 + i % 7
        assert [update.finish_reason for update in news[str(i)]][-1] == "length"
        assert all(update.finish_reason is None for update in news[str(i)][:-1])
    check(engine.state, engine.limits)
    stats = engine.stats()
    assert stats.running == stats.waiting == 0 and stats.free_pages + stats.cached_pages == 256
    assert stats.output_tokens == sum(1 + i % 7 for i in range(40))


def test_H12_temperature_0_is_deterministic_and_seeds_repeat(engine: Engine) -> None:
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
        {"presence_penalty": 1.5}, {"frequency_penalty": 1.0}, {"repetition_penalty": 1.3}, {"logit_bias": {7: 50.0}},
        {"temperature": 1.0, "min_p": 0.2, "seed": 3}, {"temperature": 1.0, "top_k": 3, "top_p": 0.5, "seed": 4},
        {"logprobs": 4}, {"prompt_logprobs": 2}, {"allowed_token_ids": (9, 10)},
    ]  # fmt: skip
    others = [request(str(i), 10 + i, 12, **kind) for i, kind in enumerate(kinds)]
    solo = {one.id: tokens(drain(engine, one)[one.id]) for one in others}
    news = drain(engine, *others, plain)

    assert tokens(news["plain"]) == alone
    assert {one.id: tokens(news[one.id]) for one in others} == solo
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
    news = drain(engine, one)["a"]
    output = tokens(news)
    scores = [score for update in news for score in update.logprobs or ()]
    whole = np.concatenate([one.prompt, output]).astype(np.int32)
    asked = SamplingParams(temperature=0.0, prompt_logprobs=1)
    echo = Request(id="b", prompt=whole, max_tokens=1, params=asked, prompt_logprobs=True)
    table = drain(engine, echo)["b"][0].prompt_logprobs

    assert [score.token for score in scores] == output and all(len(score.top) == 3 for score in scores)
    assert all(score.top[0] == (score.token, score.logprob) for score in scores)
    assert table is not None and table[0] is None and len(table) == 26
    for score, other in zip(scores, table[20:], strict=True):
        assert other is not None and other.token == score.token
        assert other.logprob == pytest.approx(score.logprob, abs=1e-4)


def test_S22_H1_bad_requests_are_refused_at_the_door(engine: Engine) -> None:
    with pytest.raises(CapacityError, match="empty"):
        engine.submit(request("a", 0))
    with pytest.raises(CapacityError, match=r"4096 tokens .*a sequence may have 4096"):
        engine.submit(request("b", 4096))
    with pytest.raises(RequestError, match="token 99999 is not in the vocabulary"):
        engine.submit(evolve(request("c"), prompt=np.array([99999], np.int32)))
    engine.submit(request("d"))
    with pytest.raises(RequestError, match="in use"):
        engine.submit(request("d"))


def test_H16_reject_refuses_under_pressure_and_accepts_again() -> None:
    engine = Engine(EngineConfig(num_pages=20, on_pressure="reject", memory_threshold=0.5, cache_type="naive"))
    engine.submit(request("a", 150, 20))
    with pytest.raises(CapacityError, match=r"--memory-threshold is 0\.5"):
        engine.submit(request("b", 10, 5))
    while engine.has_work:
        engine.step()
    news = drain(engine, request("b", 10, 5))

    assert len(tokens(news["b"])) == 5
    engine.close()


class Faulty(Runner):
    """Runs as `inner` does, but hurts one step."""

    def __init__(self, inner: Runner, at: int, kind: str) -> None:
        self.inner, self.at, self.kind, self.steps = inner, at, kind, 0

    def run(self, batch: Batch, attend: Any) -> Sample:
        self.steps += 1
        sample = self.inner.run(batch, attend)
        if self.steps != self.at:
            return sample
        if self.kind == "raise":
            raise RuntimeError("the device said no")
        healthy = sample.healthy.clone()
        healthy[1] = False
        return evolve(sample, healthy=healthy)

    def close(self) -> None:
        self.inner.close()


def test_R9_a_row_with_nan_fails_alone(engine: Engine) -> None:
    requests = [request(str(i), 12, 8) for i in range(4)]
    good = {name: tokens(news) for name, news in drain(engine, *requests).items()}
    engine.executor.runner = Faulty(engine.executor.runner, 4, "nan")
    news = drain(engine, *requests)

    reasons = [news[str(i)][-1].finish_reason for i in range(4)]
    assert reasons == ["length", "error", "length", "length"] and news["1"][-1].error
    assert {name: tokens(news[name]) for name in "023"} == {name: good[name] for name in "023"}
    assert engine.stats().failed == 1


def test_R9_pages_of_a_row_with_nan_are_finite_when_it_has_ended() -> None:
    engine = Engine(EngineConfig(**SMALL, faults=("nan@4:1",), overlap=False))
    executor: Any = engine.executor
    pools = executor.inner.buffers.pools  # the outer one makes things go wrong
    for name in "ab":
        engine.submit(request(name))
    ended: list[str | None] = []
    while not ended:
        ended += [update.finish_reason for update in engine.step() if update.finish_reason]

    assert ended == ["error"] and all(pool.isfinite().all() for pool in pools)
    engine.close()


def test_a_sick_model_gives_unhealthy_rows(engine: Engine) -> None:
    params = engine.executor.runner.program.params
    with torch.inference_mode():
        params["norm"].tensor.fill_(float("nan"))

    assert drain(engine, request("a"))["a"][-1].finish_reason == "error"


def test_G11_a_step_that_raises_fails_its_requests_and_the_engine_lives(engine: Engine) -> None:
    inner = engine.executor.runner
    engine.executor.runner = Faulty(inner, 3, "raise")
    news = drain(engine, request("a"), request("b"))

    assert all(updates[-1].finish_reason == "error" for updates in news.values())
    check(engine.state, engine.limits)
    assert len(tokens(drain(engine, request("c"))["c"])) == 8


def test_a_sink_that_raises_loses_its_request_and_disturbs_nobody(engine: Engine) -> None:
    loop = Loop(engine)
    seen: list[Update] = []

    def broken(update: Update) -> None:
        raise ValueError("no")

    loop.submit(request("a", 10, 50), broken)
    loop.submit(request("b", 10, 5), seen.append)
    for _ in range(500):
        if seen and seen[-1].finish_reason:
            break
        loop.thread.join(0.02)
    loop.close()

    assert seen[-1].finish_reason == "length" and not engine.ledger.knows("b")
    with pytest.raises(EngineDied):
        loop.submit(request("c"), seen.append)


def test_closing_a_loop_tells_everyone(engine: Engine) -> None:
    loop = Loop(engine)
    seen: list[Update] = []
    loop.submit(request("a", 10, 1000), seen.append)
    loop.close()

    assert seen[-1].finish_reason == "abort"


@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        ({"page_size": 16, "attn": "sdpa,sdpa,sdpa"}, UsageError, "one comma"),
        ({"attn": "nope"}, UsageError, "nope"),
        ({"runner": "cudagraf"}, UsageError, "cudagraph"),
        ({"kv_dtype": "fp8_e4m3"}, CannotRun, "float8_e4m3fn KV"),
        ({"kv_dtype": "bfloat16"}, CannotRun, "not float32 with bfloat16 KV"),
        ({"tp": 2}, CannotRun, "--tp 2"),
        ({"opt": ("nobody.x=1",)}, UsageError, "nobody"),
        ({"opt": ("mixed.x=1",)}, UsageError, "'mixed' has no options"),
        ({"opt": ("eager.x=1",), "runner": "eager"}, UsageError, "'eager' has no options"),
        ({"opt": ("inline.x=1",)}, UsageError, "'inline' has no options"),
        ({"opt": ("torch.x=1",), "ops": "torch"}, UsageError, "'torch' has no options"),
        ({"opt": ("naive.x=1",), "cache_type": "naive"}, UsageError, "'naive' has no options"),
        ({"opt": ("radix.y=1",), "prefix_cache_n": 0}, UsageError, "y"),
        ({"model": "/no/such/place"}, ModelError, "no model directory"),
        ({"prefix_cache_n": 3, "cache_type": "naive"}, None, ""),
        ({"memory_ratio": 0.0001}, CannotRun, "--memory-ratio 0.0001"),
    ],
)
def test_what_cannot_be_built_says_why(asked: dict[str, Any], error: type[Exception] | None, text: str) -> None:
    if error is None:
        Engine(EngineConfig(**(SMALL | asked))).close()
        return
    sizes = {} if "memory_ratio" in asked else SMALL
    with pytest.raises(error, match=text):
        Engine(EngineConfig(**(sizes | asked)))


def test_options_that_nobody_would_read_are_the_fault_of_the_plugin() -> None:
    kinds = {"cache": "radix", "scheduler": "mixed", "runner": "eager", "ops": "torch", "executor": "inline"}
    parts: dict[str, Any] = {kind: registry.spec(kind, name) for kind, name in kinds.items()}
    check_options(EngineConfig(), SimpleNamespace(attention=(), **parts))
    for kind in ("scheduler", "runner", "executor"):
        greedy = evolve(parts[kind], options=parts["cache"].options)
        with pytest.raises(PluginBroken, match=f"'{greedy.name}' declares options, but"):
            check_options(EngineConfig(), SimpleNamespace(attention=(), **(parts | {kind: greedy})))


def test_the_summary_prints_what_was_agreed(engine: Engine) -> None:
    text = "\n".join(engine.summary.lines())

    assert all(
        word in text for word in ("attn", "sdpa", "radix", "page size", "256 pages of 16 = 4096 tokens", "memory")
    )


def test_a_pool_smaller_than_a_sequence_cuts_max_seq_len_and_says_so() -> None:
    engine = Engine(EngineConfig(num_pages=10, max_running_requests=2))

    assert engine.max_seq_len == 160 and any("cut from 4096 to 160" in note for note in engine.summary.notes)
    engine.close()


def test_weights_that_do_not_fit_name_both_numbers(tmp_path: Path) -> None:
    hf = {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 65536, "num_hidden_layers": 96, "head_dim": 128,
        "num_attention_heads": 512, "num_key_value_heads": 512, "intermediate_size": 262144, "vocab_size": 262144,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 1024, "hidden_act": "silu", "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(CannotRun, match=r"the weights need \d+\.\d+ GiB in float32, and \d+\.\d+ GiB are free on cpu"):
        Engine(EngineConfig(model=str(tmp_path), load_format="dummy"))
    (tmp_path / "config.json").write_text(json.dumps(hf | {"max_position_embeddings": 10**10}))
    with pytest.raises(ModelError, match=r"max_position_embeddings is 10000000000, wanted at most 16777216"):
        Engine(EngineConfig(model=str(tmp_path), load_format="dummy"))


def test_the_smallest_top_p_keeps_the_best_token(engine: Engine) -> None:
    one = request("a", 20, 6)
    narrow = evolve(one, id="b", params=SamplingParams(temperature=1.5, top_p=1e-300, seed=1))

    assert tokens(drain(engine, narrow)["b"]) == tokens(drain(engine, one)["a"])


@pytest.mark.parametrize("overlap", [True, False])
def test_a_closed_engine_holds_neither_weights_nor_pool(overlap: bool) -> None:
    engine = Engine(EngineConfig(**(SMALL | {"overlap": overlap})))
    executor = getattr(engine.executor, "inner", engine.executor)
    held = [weakref.ref(executor.buffers.pools[0]), weakref.ref(executor.runner.program.params["norm"].tensor)]
    drain(engine, request("a", 12, 4))
    del executor
    assert all(each() is not None for each in held)
    engine.close()
    gc.collect()

    assert [each() for each in held] == [None, None]


@pytest.mark.parametrize("ids", [{"logit_bias": {768: 1.0}}, {"allowed_token_ids": (768,)}])
def test_R1_ids_outside_the_vocabulary_are_refused_at_submission(engine: Engine, ids: dict[str, Any]) -> None:
    engine.submit(request("victim", 10, 5))
    with pytest.raises(RequestError, match=f"{next(iter(ids))}: token 768 is not in the vocabulary of 768"):
        engine.submit(request("attacker", 10, 5, **ids))
    while engine.has_work:
        engine.step()

    assert engine.stats().failed == 0


@pytest.mark.parametrize("attn", ["sdpa", "sdpa,sdpa"])
def test_S12_one_name_serves_both_phases_with_one_instance(attn: str) -> None:
    engine = Engine(EngineConfig(**(SMALL | {"attn": attn, "overlap": False})))
    router = engine.executor.router

    assert router.prefill is router.decode and len(router.backends) == 1
    engine.close()
