"""Greedy tokens of the demo model in float32 do not depend on neighbours, page size, chunks,
preemption or hits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from often import often
from step_watch import watch_steps

from headstock import LLM, SamplingParams

TIE = 1e-4
"""A margin between the two best tokens, in logits, under which float32 may fall on either side."""

MAX_TOKENS = 14


def prompts() -> list[str]:
    """32 prompts of the demo model's world, many with a common beginning."""
    kinds = ("girl", "boy", "fox", "cat", "owl", "bear", "dog", "hen")
    names = ("Anna", "Ben", "Mia", "Theo", "Sara", "Hugo", "Lena", "Otto")
    facts = " ".join(
        f"Remember: the number of the boat of {name} is {1234 + 7 * i}."
        for i, name in enumerate(names)
    )
    return [
        *(f"{facts} What is the number of the boat of {name}?" for name in names),
        *(f"{12 + i} + {31 + 2 * i} =" for i in range(8)),
        *(f"Once upon a time, there was a little {kind}" for kind in kinds),
        *(f"{name} had a boat." for name in names),
    ]  # fmt: skip


def generate(each: int = 1, **settings: Any) -> tuple[list[tuple[int, ...]], LLM]:
    """The greedy tokens of all prompts, or of every so many, at once, and the engine that made them
    (closed).
    """
    # Steps overlap, as on a GPU.
    sizes = {"num_pages": 2048, "page_size": 16, "max_seq_len": 1024, "overlap": True}
    settings = sizes | settings
    # What plugins write is watched where answers are few: it takes three times as long.
    with LLM("demo", debug_invariants=each > 1, **settings) as llm:
        llm.counts = watch_steps(llm._session.engine)
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2)
        outputs = llm.generate(prompts()[::each], params)
        tokens = [output.outputs[0].token_ids for output in outputs]
        llm.margins = [
            [margin(table) for table in output.outputs[0].logprobs] for output in outputs
        ]
    return tokens, llm


def margin(table: dict[int, Any]) -> float:
    """How far the best token is ahead of the second."""
    best, second = sorted((entry.logprob for entry in table.values()), reverse=True)[:2]
    return float(best - second)


@pytest.fixture(scope="module")
def reference() -> list[tuple[int, ...]]:
    """Each prompt by itself, nothing shared."""
    tokens, llm = generate(cache_type="naive", max_running_requests=1, overlap=False)
    assert llm._session.engine.stats().cached_tokens == 0
    return tokens


def assert_same(
    tokens: Sequence[tuple[int, ...]], llm: LLM, reference: Sequence[tuple[int, ...]]
) -> None:
    """Equal, but for what follows a margin under TIE, which is printed."""
    for number, (ours, theirs) in enumerate(zip(tokens, reference, strict=True)):
        if ours == theirs:
            continue
        at = int(np.flatnonzero(np.array(ours) != np.array(theirs))[0])
        found = llm.margins[number][at]
        assert found < TIE, f"prompt {number}: {ours} instead of {theirs}"


@pytest.mark.feature("P8", "P11")
@pytest.mark.parametrize(
    "settings",
    often(
        2,
        [
            {"max_batch_tokens": 7},
            {
                "opt": ("sdpa.shared_prefix=on",),
                "proposer": "ngram",
                # More rows would leave no room for drafts, of which a step on a CPU verifies few.
                "max_running_requests": 5,
                "max_batch_tokens": 200,
                "max_itl_ms": 1.0,
                "overlap": True,
            },
            {"scheduler": "equal-length"},
            {"scheduler": "prefill-first"},
            {"ops": "torch"},
            {"opt": ("sdpa.shared_prefix=on",)},
            {"proposer": "ngram", "max_running_requests": 5},
            {"page_size": 1, "num_pages": 8192},
            {"page_size": 128},
            {"max_batch_tokens": 64, "max_running_requests": 5},
            {"scheduler": "decode-first"},
            {"ops": "onednn"},
            {"ops": "fbgemm"},
            {"attn": "sdpa,sdpa"},
            {
                "proposer": "ngram",
                "max_running_requests": 5,
                "overlap": False,
                "opt": ("ngram.min_match=1",),
            },
        ],
    ),
    ids=lambda settings: ",".join(f"{key}={value}" for key, value in settings.items()),
)
def test_I_the_same_tokens_for_32_prompts_at_once(
    settings: dict[str, Any], reference: list[Any]
) -> None:
    tokens, llm = generate(**settings)

    assert_same(tokens, llm, reference)
    # Equal tokens prove nothing of what was not done.
    counts, stats = llm.counts, llm._session.engine.stats()
    assert bool(counts["groups"]) == ("sdpa.shared_prefix=on" in settings.get("opt", ()))
    assert bool(counts["paced"]) == ("max_itl_ms" in settings)
    assert bool(stats.accepted_draft_tokens) == ("proposer" in settings)


@pytest.mark.feature("T6")
@pytest.mark.parametrize("cache", often(1, ["radix", "naive"]))
def test_the_same_tokens_under_preemption(cache: str, reference: list[Any]) -> None:
    tokens, llm = generate(page_size=4, num_pages=104, max_seq_len=400, cache_type=cache)

    assert llm._session.engine.stats().preemptions > 0, (
        "the pool is not tight enough to force preemption"
    )
    assert_same(tokens, llm, reference)


@pytest.mark.feature("T6", "P11")
def test_shared_prefixes_that_are_read_once_give_the_same_samples_under_preemption() -> None:
    settings = {"page_size": 4, "num_pages": 104, "max_seq_len": 400, "overlap": True}
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=20, ignore_eos=True)
    tokens = []
    for value in ("off", "on"):
        with LLM("demo", opt=(f"sdpa.shared_prefix={value}",), **settings) as llm:
            counts = watch_steps(llm._session.engine)
            outputs = llm.generate(prompts()[:12], params)
            tokens.append([output.outputs[0].token_ids for output in outputs])
            assert llm._session.engine.stats().preemptions > 0
            assert bool(counts["groups"]) == (value == "on")

    assert tokens[0] == tokens[1]


@pytest.mark.feature("T6", "P8", "R9")
@pytest.mark.parametrize("overlap", often(1, [True, False]))
def test_accepted_drafts_are_the_samples_of_a_seed_up_to_a_stop_string(overlap: bool) -> None:
    said = "One boat, two boats, one boat, two boats, one boat, two boats, one boat"
    params = [
        SamplingParams(temperature=0.9, seed=5, max_tokens=60, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, stop=["oat", "nd"]),
        SamplingParams(temperature=0.6, seed=9, max_tokens=60, top_p=0.9, presence_penalty=0.5),
    ]
    settings = {"page_size": 4, "num_pages": 28, "max_seq_len": 100, "overlap": overlap}
    answers = []
    for proposer in ("off", "ngram"):
        with LLM("demo", proposer=proposer, debug_invariants=True, **settings) as llm:
            outputs = llm.generate([said] * 6, params * 2)
            stats = llm._session.engine.stats()
            answers.append([output.outputs[0] for output in outputs])
    assert stats.accepted_draft_tokens > 5 and stats.preemptions > 0
    assert [(each.text, each.token_ids, each.finish_reason) for each in answers[0]] == [
        (each.text, each.token_ids, each.finish_reason) for each in answers[1]
    ]
    assert "stop" in {each.finish_reason for each in answers[0]}
    for ours, theirs in zip(*(each[::3] for each in answers), strict=True):
        assert len(ours.logprobs) == len(theirs.logprobs) == len(ours.token_ids)
        for table, other, token in zip(ours.logprobs, theirs.logprobs, ours.token_ids, strict=True):
            assert table[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)


@pytest.mark.full
@pytest.mark.feature("T14")
def test_no_kv_cache_gives_the_same_tokens(reference: list[Any]) -> None:
    tokens, llm = generate(each=4, kv_cache=False)

    assert llm._session.engine.stats().cached_tokens == 0
    assert_same(tokens, llm, reference[::4])


@pytest.mark.feature("T8")
def test_contiguous_regions_give_the_same_tokens(reference: list[Any]) -> None:
    # Invariants are checked by copies of whole regions, which take their time.
    tokens, llm = generate(
        each=6, paged_attn="off", num_pages=None, page_size="auto", max_running_requests=6
    )

    assert_same(tokens, llm, reference[::6])


@pytest.mark.feature("S16", "S17")
def test_radix_hits_on_shared_prefixes_and_naive_never(reference: list[Any]) -> None:
    for cache, hits in (("radix", True), ("naive", False)):
        tokens, llm = generate(cache_type=cache, max_running_requests=4)
        assert (llm._session.engine.stats().cached_tokens > 0) is hits
        assert_same(tokens, llm, reference)


@pytest.mark.feature("P8")
@pytest.mark.parametrize(
    ("quant", "settings"),
    often(
        1,
        [
            ("int8", {"max_batch_tokens": 7}),
            ("int4", {"proposer": "ngram", "max_running_requests": 5}),
            *(
                (quant, settings)
                for quant in ("fp8", "int8", "int4")
                for settings in (
                    {"max_batch_tokens": 7},
                    {"page_size": 1, "num_pages": 8192},
                    {"opt": ("sdpa.shared_prefix=on",)},
                    {"scheduler": "prefill-first"},
                    {"num_pages": 24, "page_size": 16},
                    {"proposer": "ngram", "max_running_requests": 5, "overlap": False},
                )
            ),
        ],
    ),
    ids=str,
)
def test_quantized_maps_give_the_same_tokens_too(quant: str, settings: dict[str, Any]) -> None:
    alone, llm = generate(4, quant=quant, cache_type="naive", max_running_requests=1, overlap=False)
    tokens, llm = generate(4, quant=quant, **settings)
    assert_same(tokens, llm, alone)
