"""Windows and states beside full layers: the same answers with and without shared prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import BESIDE_MLP, GEMMA2_CAPS, NESTED, NEW, WIDE_HEADS, Case
from often import often

from headstock import LLM, SamplingParams
from headstock_conformance.model.parity import write

CASES = {
    "gemma2": Case("gemma2", {**GEMMA2_CAPS, "sliding_window": 21, **NEW}),
    "gemma3": Case(
        "gemma3_text",
        {
            "sliding_window": 13,
            "rope_parameters": NESTED,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gpt-oss": Case("gpt_oss", {"sliding_window": 21, "swiglu_limit": 0.4, **NEW}),
    "gemma4": Case("gemma4_text", {**WIDE_HEADS, **BESIDE_MLP, "sliding_window": 13}),
    "window alone": Case(
        "gemma2", {"sliding_window": 18, "layer_types": ["sliding_attention"] * 3}
    ),
    "lfm2": Case(
        "lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_L_cache": 4,
            "block_multiple_of": 8,
        },
    ),
    "qwen3.5": Case(
        "qwen3_5_text",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
        },
    ),
}
HYBRIDS = ("lfm2", "qwen3.5")
TIE = 1e-4
"""A margin between the two best tokens, in logits, under which float32 may fall on either side."""


def make_prompts() -> list[list[int]]:
    """Prompts of two common beginnings, longer than the windows, and turns that go on from them."""
    rng = np.random.default_rng(4)
    heads = rng.integers(3, 96, (2, 90)).tolist()
    lengths = rng.integers(1, 90, 12).tolist()
    return [
        heads[number % 2][:length] + rng.integers(3, 96, 1 + number).tolist()
        for number, length in enumerate(lengths)
    ] + [heads[0], heads[1]]


def generate(path: Path, rounds: int = 1, **settings: Any) -> tuple[list[Any], LLM]:
    """The answers to all prompts, `rounds` times, and the engine that gave them (closed)."""
    sizes = {"num_pages": 600, "page_size": 4, "max_seq_len": 160, "attn": "sdpa", "overlap": True}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
    with LLM(str(path), dtype="float32", debug_invariants=True, **(sizes | settings)) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in make_prompts()]
        answers = [llm.generate(prompts, params) for _ in range(rounds)][-1]
    return [answer.outputs[0] for answer in answers], llm


def count_cached(llm: LLM) -> int:
    """How many prompt tokens came from the index."""
    count: int = llm._session.engine.stats().cached_tokens
    return count


@pytest.mark.parametrize("name", often(1, [name for name in CASES if name not in HYBRIDS]))
@pytest.mark.parametrize(
    "settings",
    often(
        1,
        [
            {"debug_canary": True},
            {"num_pages": 60, "max_batch_tokens": 24},
            {"page_size": 1, "num_pages": 300, "max_running_requests": 4},
            {"overlap": False, "page_size": 16, "num_pages": 30, "debug_canary": True},
            {"opt": ("sdpa.shared_prefix=on",)},
        ],
    ),
    ids=str,
)
def test_hits_change_no_token(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, CASES[name].hf | {"max_position_embeddings": 256})
    alone, naive = generate(tmp_path, cache_type="naive", max_running_requests=1, overlap=False)
    assert count_cached(naive) == 0
    answers, llm = generate(tmp_path, rounds=2, **settings)

    assert count_cached(llm) > 300
    # Rows whose groups all keep windows are admitted with the most that they will ever hold.
    is_scarce = settings.get("num_pages") == 60 and name != "window alone"
    assert (llm._session.engine.stats().preemptions > 0) == is_scarce
    assert_alike(answers, alone)


@pytest.mark.feature("V11")
@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize(
    "settings",
    often(
        1,
        [
            {"debug_canary": True, "snapshot_tokens": 64},
            {"num_pages": 60, "max_batch_tokens": 80, "snapshot_tokens": 64},
            {"overlap": False, "page_size": 16, "num_pages": 30, "max_batch_tokens": 200},
            {"snapshot_ratio": 0.05, "num_pages": 90, "scheduler": "prefill-first"},
        ],
    ),
    ids=str,
)
def test_states_that_are_taken_over_change_no_token(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path, CASES[name].hf | {"max_position_embeddings": 256})
    alone, _ = generate(tmp_path, cache_type="naive", max_running_requests=1, overlap=False)
    answers, llm = generate(tmp_path, rounds=2, **{"max_running_requests": 8} | settings)

    assert count_cached(llm) > 300
    # Chunks of 64 tokens keep the rows of the other from running at once.
    is_scarce = settings.get("num_pages") == 60 and name == "lfm2"
    assert (llm._session.engine.stats().preemptions > 0) == is_scarce
    assert_alike(answers, alone)


def assert_alike(answers: Sequence[Any], alone: Sequence[Any]) -> None:
    """Raise AssertionError where tokens differ that are no tie."""
    for number, (ours, theirs) in enumerate(zip(answers, alone, strict=True)):
        if ours.token_ids != theirs.token_ids:
            ids = np.array([ours.token_ids, theirs.token_ids])
            at = int(np.flatnonzero(ids[0] != ids[1])[0])
            best, second = sorted(each.logprob for each in theirs.logprobs[at].values())[::-1]
            assert best - second < TIE, f"prompt {number}: {ids[0]} and alone {ids[1]}"
