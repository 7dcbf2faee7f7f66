"""Cache and pressure modes, priorities, tenants and several answers, as users of LLM meet them on
the demo model.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
from often import often

from headstock import LLM, RequestError, SamplingParams
from headstock.config import PRESETS
from headstock.scheduler import Plan

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SMALL = {"num_pages": 256, "max_seq_len": 1024, "debug_invariants": True}
LONG = (
    "Remember: the number of the boat of Anna is 1234. " * 3
    + "What is the number of the boat of Anna?"
)
OTHER = (
    "Remember: the number of the boat of Otto is 4321. " * 3
    + "What is the number of the boat of Otto?"
)


def cached(llm: LLM, prompt: Any) -> int:
    """Tokens of the prompt that were not computed."""
    (output,) = llm.generate(prompt, GREEDY)
    return output.metrics.cached_tokens or 0


def plans_of(llm: LLM) -> list[Plan]:
    """The plans that the engine makes from now on."""
    plans: list[Plan] = []
    recorder = llm._session.engine.recorder
    record_step = recorder.record_step

    def watched(events: Any, state: Any, plan: Plan) -> None:
        plans.append(plan)
        record_step(events, state, plan)

    recorder.record_step = watched
    return plans


@pytest.mark.feature("T13", "T17")
def test_prefix_cache_n() -> None:
    asked = (LONG, LONG, OTHER, LONG)
    found = {}
    for n in (0, 1, None):
        with LLM("demo", prefix_cache_n=n, **SMALL) as llm:
            found[n] = [cached(llm, prompt) > 0 for prompt in asked]

    assert found == {
        0: [False] * 4,
        1: [False, True, False, False],
        None: [False, True, False, True],
    }


@pytest.mark.full
@pytest.mark.feature("T14")
def test_no_kv_cache_hits_nothing_and_stops_where_others_do() -> None:
    params = SamplingParams(temperature=0, max_tokens=12, stop="boat")
    with LLM("demo", **SMALL) as llm:
        usual = llm.generate([LONG, OTHER, LONG], params)
    for overlap in (True, False):
        with LLM(
            "demo",
            kv_cache=False,
            max_batch_tokens=24,
            max_running_requests=2,
            overlap=overlap,
            **SMALL,
        ) as llm:
            again = llm.generate([LONG, OTHER, LONG], params)
            assert llm._session.engine.stats().cached_tokens == 0
        assert [output.outputs for output in again] == [output.outputs for output in usual]


@pytest.mark.feature("T16")
@pytest.mark.parametrize("paged", often(1, ["on", "off"]))
def test_a_talk_goes_on_from_its_last_turn(paged: str) -> None:
    pool = {} if paged == "on" else {"num_pages": None, "max_running_requests": 4}
    with LLM("demo", paged_attn=paged, **(SMALL | pool)) as llm:
        (first,) = llm.generate(LONG, GREEDY)
        tokens = [
            *first.prompt_token_ids,
            *first.outputs[0].token_ids,
            *llm._session.tokenizer.encode(" And why?"),
        ]
        (second,) = llm.generate(tokens, GREEDY)
        llm._session.loop.reset_prefix_cache()
        (fresh,) = llm.generate(tokens, GREEDY)
        common = cached(llm, tokens[:40])

    page = 16
    whole = len(first.prompt_token_ids) + 12 - 1  # the last token was never computed
    assert second.metrics.cached_tokens == (whole if paged == "off" else whole // page * page)
    assert fresh.metrics.cached_tokens == 0 and fresh.outputs == second.outputs
    assert common == (0 if paged == "off" else 32)


@pytest.mark.feature("T8")
def test_the_summary_credits_the_flag_that_gave_one_region_each() -> None:
    for flags, table in (
        (
            {"paged_attn": "off"},
            [("page size", "one region each", "paged_attn (--paged-attn) off")],
        ),
        (
            {"paged_attn": "off"},
            [("prefix reuse", "of whole sequences", "paged_attn (--paged-attn) off")],
        ),
        (
            {"paged_attn": "off", "cache_type": "naive"},
            [("prefix reuse", "off", "cache_type (--cache-type) naive")],
        ),
        ({"kv_cache": False}, [("prefix reuse", "off", "kv_cache (--kv-cache) off")]),
        ({"prefix_cache_n": 0}, [("prefix reuse", "off", "prefix_cache_n (--prefix-cache-n) 0")]),
        ({}, [("prefix reuse", "on", "cache_type (--cache-type) radix")]),
    ):
        with LLM("demo", max_seq_len=128, max_running_requests=2, **flags) as llm:
            assert set(table) <= set(llm._session.engine.summary.table)


@pytest.mark.feature("S22")
def test_shorter_sequences_make_smaller_tables_and_longer_prompts_are_refused() -> None:
    sizes = {}
    for longest in (256, 1024):
        with LLM("demo", overlap=False, **(SMALL | {"max_seq_len": longest})) as llm:
            buffers = llm._session.engine.executor.steps.buffers
            sizes[longest] = (
                buffers.page_tables[0].shape[1],
                buffers.tokens.shape[1],
                llm._session.engine.state.tokens.shape[1],
            )
            with pytest.raises(
                RequestError, match=f"prompt has {longest} tokens, but sequences may have {longest}"
            ):
                llm.generate([[7] * longest], GREEDY)
            (output,) = llm.generate([[7] * (longest - 1)], GREEDY)
            assert (
                output.outputs[0].finish_reason == "length"
                and len(output.outputs[0].token_ids) == 1
            )

    assert all(small <= large // 3 for small, large in zip(sizes[256], sizes[1024], strict=True))
    assert sizes[256][0] == 256 // 16


@pytest.mark.feature("H16")
def test_generate_feeds_as_room_appears() -> None:
    prompts = [LONG if i % 2 else OTHER for i in range(12)]
    with LLM("demo", cache_type="naive", **(SMALL | {"num_pages": 32})) as llm:
        usual = llm.generate(prompts, GREEDY)
    settings = {
        "on_pressure": "reject",
        "memory_threshold": 0.6,
        "cache_type": "naive",
        "num_pages": 32,
    }
    with LLM("demo", **(SMALL | settings)) as llm:
        answers = llm.generate(prompts, GREEDY)
        stats = llm._session.engine.stats()

    assert [answer.outputs for answer in answers] == [answer.outputs for answer in usual]
    assert stats.failed == stats.preemptions == 0 and stats.peak_held_pages <= 32


@pytest.mark.feature("H16")
def test_a_request_that_meets_another_ones_pressure_is_told_so() -> None:
    settings = {
        "on_pressure": "reject",
        "memory_threshold": 0.1,
        "cache_type": "naive",
        "num_pages": 32,
    }
    with LLM("demo", **(SMALL | settings)) as llm:
        stream = llm.stream(
            LONG * 2, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        )
        next(stream)
        (refused,) = llm.generate(OTHER, GREEDY)
        stream.close()  # type: ignore[attr-defined]
        deadline = time.monotonic() + 600
        while llm._session.engine.memory_pressure and time.monotonic() < deadline:
            time.sleep(0.01)
        (accepted,) = llm.generate(OTHER, GREEDY)

    assert refused.outputs[0].finish_reason == "error" and "(--memory-threshold) is 0.1" in str(
        refused.outputs[0].error
    )
    assert accepted.outputs[0].finish_reason == "length"


def test_tenants_never_share_pages() -> None:
    with LLM("demo", **SMALL) as llm:
        mine, theirs = ({"prompt": LONG, "cache_salt": salt} for salt in ("mine", "theirs"))

        assert cached(llm, mine) == cached(llm, theirs) == cached(llm, LONG) == 0
        assert cached(llm, mine) == cached(llm, theirs) == cached(llm, LONG) > 0
        tokens = llm._session.tokenizer.encode(LONG)
        assert cached(llm, {"prompt_token_ids": tokens, "cache_salt": "mine"}) > 0
        for wrong in ("", 3, "x" * 257):
            with pytest.raises(RequestError, match="cache_salt: expected a string of 1 to 256"):
                llm.generate({"prompt": LONG, "cache_salt": wrong})


def test_tenants_never_hold_the_same_page_at_the_same_time() -> None:
    shared = []
    with LLM("demo", **SMALL) as llm:
        recorder = llm._session.engine.recorder
        record_step = recorder.record_step

        def watched(events: Any, state: Any, plan: Plan) -> None:
            held: dict[str, set[int]] = {}
            for row, entry in enumerate(state.requests_by_row):
                if entry is not None:
                    held.setdefault(entry.request.namespace, set()).update(
                        state.pages[0][row].tolist()
                    )
            shared.extend(held["a"] & held["b"] if len(held) == 2 else ())
            record_step(events, state, plan)

        recorder.record_step = watched
        prompts = [{"prompt": LONG, "cache_salt": "ab"[i % 2]} for i in range(8)]
        answers = llm.generate(prompts, GREEDY)
        assert llm._session.engine.stats().cached_tokens > 0

    assert shared == [] and len({answer.outputs[0].text for answer in answers}) == 1


def test_lower_priority_numbers_go_first_as_in_vllm() -> None:
    with LLM("demo", max_running_requests=1, cache_type="naive", **SMALL) as llm:
        prompts = [f"{i} + {i} =" for i in range(6)]
        ended: list[str] = []
        prompt_requests = llm._session.input_processor.process_batch(
            prompts, GREEDY, [0, 0, 2, -1, 1, -1]
        )
        for prompt_request, _ in llm._session.stream_outputs(prompt_requests):
            if prompt_request.is_finished:
                ended.append(prompt_request.prompt.text)
        assert ended == [prompts[i] for i in (3, 5, 0, 1, 4, 2)]
        for wrong in ([1], "ab", 3):
            with pytest.raises(
                RequestError, match="priority: expected a list with a number for each prompt"
            ):
                llm.generate(["a", "b"], GREEDY, priority=wrong)
        with pytest.raises(RequestError, match=r"prompts\[1\]: priority: expected an integer"):
            llm.generate(["a", "b"], GREEDY, priority=[0, 1 << 40])


def test_a_request_of_higher_priority_preempts_others_for_pages() -> None:
    # Seconds of watching what is written, otherwise.
    few = SMALL | {"num_pages": 24, "max_seq_len": 320, "debug_invariants": False}
    with LLM("demo", cache_type="naive", **few) as llm:
        long_ones = SamplingParams(temperature=0, max_tokens=110, ignore_eos=True)
        streams = [llm.stream(prompt, long_ones, priority=5) for prompt in (LONG, OTHER)]
        first = [next(stream) for stream in streams]
        tokens = (llm._session.tokenizer.encode(LONG) * 19)[:280]
        (urgent,) = llm.generate([tokens], GREEDY, priority=[-5])
        rest = [list(stream) for stream in streams]
        alone = llm.generate([LONG, OTHER], long_ones)

    assert urgent.metrics.preemptions == 0 and urgent.outputs[0].finish_reason == "length"
    # By the urgent one: the two have room beside each other.
    assert sum(pieces[-1].metrics.preemptions for pieces in rest) > 0
    assert [whole.metrics.preemptions for whole in alone] == [0, 0]
    for begin, pieces, whole in zip(first, rest, alone, strict=True):
        found = [token for piece in (begin, *pieces) for token in piece.outputs[0].token_ids]
        assert [*found] == whole.outputs[0].token_ids


@pytest.mark.feature("T12", "T15")
@pytest.mark.parametrize("overlap", often(1, [True, False]))
def test_n_answers_compute_their_prompt_once_and_share_its_pages(overlap: bool) -> None:
    n = 4
    params = SamplingParams(n=n, seed=7, max_tokens=12, ignore_eos=True)
    with LLM("demo", overlap=overlap, **SMALL) as llm:
        plans = plans_of(llm)
        (output,) = llm.generate(LONG, params)
        length = len(output.prompt_token_ids)
        computed = sum(plan.num_tokens for plan in plans)
        llm._session.loop.reset_prefix_cache()
        alone = [
            llm.generate(LONG, SamplingParams(seed=7 + i, max_tokens=12, ignore_eos=True))
            for i in range(n)
        ]

    tail = length - (length - 1) // 16 * 16
    assert computed <= length + (n - 1) * tail + n * 11 + (n if overlap else 0)
    assert [answer.token_ids for answer in output.outputs] == [
        one.outputs[0].token_ids for (one,) in alone
    ]


@pytest.mark.feature("S25", "H17")
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_starts_and_serves(name: str, caplog: pytest.LogCaptureFixture) -> None:
    # put back afterwards, whatever the preset makes of it
    caplog.set_level(logging.WARNING, "headstock")
    with LLM(preset=name, kv_memory_mb=64) as llm:
        outputs = llm.generate([LONG, OTHER, LONG], GREEDY)
        config = llm._session.engine.config

    assert [len(output.outputs[0].token_ids) for output in outputs] == [12] * 3
    assert outputs[0].outputs == outputs[2].outputs
    # a size was given
    wanted = {key: value for key, value in PRESETS[name].items() if key != "memory_ratio"}
    assert {key: getattr(config, key) for key in wanted} == wanted
