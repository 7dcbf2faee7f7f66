"""Several ranks give the tokens of one, whatever the model and the requests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import patience
import pytest
from engine_parity import answer_alone, assert_equal, generate
from family_cases import CASES
from often import often

from headstock import LLM, SamplingParams
from headstock_conformance.model import parity

MODELS: dict[str, dict[str, Any]] = {
    # A convolution's state; latent vectors and experts; a norm of whole queries; windows by group;
    # a delta rule's state.
    **{
        name: next(case.hf for case in CASES if case.hf["model_type"] == name)
        for name in (
            *("lfm2", "deepseek_v3", "olmo2", "gemma3_text", "gemma2", "mixtral"),
            *("qwen3_5_moe_text", "qwen3_next"),
        )
    },
    "qwen3_moe": parity.shape("qwen3_moe", attention_bias=True, mlp_only_layers=[1]),
    "llama": parity.shape("llama", vocab_size=97),
    "mistral": parity.shape("mistral", sliding_window=6),
}
WORDS = "Once upon a time there was a little girl who had a red ball and a dog".split()
SIZES: dict[str, Any] = {
    "device": "cpu",
    "num_pages": 96,
    "page_size": 16,
    "max_running_requests": 16,
    "max_seq_len": 512,
    "max_batch_tokens": 96,
}


@pytest.mark.feature("S19", "S20")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *often(0, [(name, {}) for name in MODELS]),
        *often(0, [(name, {"ep": True}) for name in ("qwen3_moe", "mixtral", "deepseek_v3")]),
    ],
)
def test_two_ranks_give_the_tokens_of_transformers(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    hf = MODELS[name]
    parity.write(tmp_path, hf)
    outputs, engine = generate(tmp_path, tp=2, debug_canary=False, max_batch_tokens=16, **settings)

    assert (engine.config.tp, engine.config.ep) == (2, settings.get("ep", False))
    for number, (output, answer) in enumerate(zip(outputs, answer_alone(tmp_path), strict=True)):
        assert_equal(output, answer, number)


@pytest.mark.full
@pytest.mark.feature("V11")
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_ranks_copy_states_alike(name: str, tmp_path: Path) -> None:
    parity.write(tmp_path, MODELS[name] | {"max_position_embeddings": 512})
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 90, 150).tolist()
    prompts = [{"prompt_token_ids": [*shared, *rng.integers(3, 90, 9).tolist()]} for _ in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    answers = []
    for tp in (1, 2):
        sizes = SIZES | {"max_running_requests": 4, "snapshot_tokens": 64}
        with LLM(str(tmp_path), dtype="float32", tp=tp, attn="sdpa", **sizes) as llm:
            rounds = [llm.generate(prompts, params) for _ in range(2)]
            assert llm._session.engine.stats().cached_tokens > 600
        answers.append([[each.outputs[0].token_ids for each in outputs] for outputs in rounds])
    assert answers[0] == answers[1]


def answer_all(llm: LLM) -> tuple[list[Any], list[float]]:
    """Tokens, and log-probabilities and vectors, of requests of many kinds at once."""
    rng = np.random.default_rng(0)
    prompts, params = [], []
    for i in range(21):
        prompts.append(
            " ".join(WORDS) * int(rng.integers(1, 4)) + " " + " ".join(rng.choice(WORDS, 6))
        )
        params.append(
            SamplingParams(
                temperature=(0.0, 0.7, 1.0)[i % 3],
                seed=i,
                max_tokens=int(rng.integers(4, 40)),
                top_k=40 * (i % 2),
                top_p=(1.0, 0.8)[i // 6 % 2],
                ignore_eos=bool(i % 2),
                repetition_penalty=(1.0, 1.2)[i // 12],
                logprobs=2 if i % 4 == 0 else None,
                prompt_logprobs=1 if i == 7 else None,
                stop=["dog"] if i == 5 else None,
                logit_bias={5: 3.0} if i == 9 else None,
                structured_outputs=GRAMMARS[i % 3] if i % 8 == 4 else None,
            )
        )
    tokens: list[Any] = []
    numbers: list[float] = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        tables = output.outputs[0].logprobs or ()
        asked = len(output.prompt_logprobs or ())
        tokens.append((output.outputs[0].token_ids, list(map(sorted, tables)), asked))
        numbers += (table[token].logprob for table in tables for token in sorted(table))
    for output in llm.embed([prompts[0], prompts[5]], use_tqdm=False):
        numbers += output.outputs.embedding[:16]
    return tokens, numbers


GRAMMARS: tuple[dict[str, Any], ...] = (
    {"choice": ["yes", "no, never", "perhaps"]},
    {"regex": "[a-z]{3,9} and [a-z]{2}"},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
)


@pytest.mark.feature("S19")
@pytest.mark.parametrize(
    ("count", "settings"),
    often(
        1,
        [
            (2, {"proposer": "ngram", "overlap": True}),
            (2, {"num_pages": 24}),
            (2, {"max_batch_tokens": 17, "cache_type": "naive", "ops": "torch"}),
            (2, {"paged_attn": "off", "num_pages": None}),
            (2, {"scheduler": "prefill-first", "debug_ops": True, "debug_attention": True}),
            (4, {"proposer": "ngram"}),
        ],
    ),
)
def test_ranks_give_what_one_gives(count: int, settings: dict[str, Any]) -> None:
    with LLM("demo", **(SIZES | settings)) as alone:
        tokens, numbers = answer_all(alone)
    with LLM("demo", tp=count, **(SIZES | settings)) as llm:
        found, more = answer_all(llm)

    assert found == tokens
    # Ranks sum up in another order.
    np.testing.assert_allclose(more, numbers, atol=1e-3, rtol=0)


@pytest.mark.full
@pytest.mark.feature("S19")
def test_a_recording_of_ranks_replays_without_them(tmp_path: Path) -> None:
    path = tmp_path / "ranks.recording"
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=12, ignore_eos=True)
    with LLM("demo", tp=2, record=str(path), **SIZES) as llm:
        llm.generate([" ".join(WORDS)] * 6, params, use_tqdm=False)

    command = [sys.executable, "-m", "headstock", "replay", str(path), "--check"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=patience.seconds
    )

    assert done.returncode == 0, done.stderr
