"""Latent vectors on the device: each backend's kernels, and a small DeepSeek under all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from headstock import LLM, SamplingParams, registry
from headstock.errors import HeadstockError
from headstock.spi import AttentionBackend, LayerInfo, Phase
from headstock_conformance import attention as cases
from headstock_conformance.attention import AttentionCase

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

RANK, ROPE_DIM = 512, 64
LAYER = LayerInfo(index=0, group=0, scale=192**-0.5)
HF: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 256,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": ROPE_DIM,
    "v_head_dim": 128,
    "moe_intermediate_size": 256,
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 1024,
}
PROMPTS = [[(7 * at + 3 * row) % 512 for at in range(1 + 23 * row)] for row in range(12)]
NUM_TOKENS = 24
NEAR = 0.04
"""A margin between the two best tokens, in log-probability, within which 16 bits may differ.

It is two steps of a bfloat16 logit between 2 and 4, and a little more.
"""
LEAST_COMPARED = len(PROMPTS) * NUM_TOKENS // 2
"""Tokens that are compared before rows part at such a margin; bfloat16 and float32 share 254 of 288
on a CPU.
"""


def make(
    phase: Phase, lens: list[tuple[int, int]], page_size: int, heads: int, dtype: Any
) -> AttentionCase:
    """A case in DeepSeek's widths; NaN lies around what a step may read."""
    shape = {"kv_heads": 1, "head_dim": RANK + ROPE_DIM, "dtype": dtype, "device": "cuda"}
    return cases.make_latent(
        cases.make(phase, lens, page_size=page_size, heads=heads, tail=0.0, **shape), ROPE_DIM
    )


def build(name: str, case: AttentionCase) -> AttentionBackend:
    """The backend of that name; skips where its library is not installed."""
    spec = registry.load_spec("attention", name)
    try:
        registry.require_installed(spec)
    except HeadstockError as error:
        pytest.skip(str(error))
    options = registry.make_options(spec, ())
    context = cases.context_of(case, options, max_rows=64, max_seq_len=4096)
    # FlashInfer plans with the layers' scale before it is given one.
    context = evolve(context, layers=dict.fromkeys(context.layers, evolve(LAYER, out_dim=RANK)))
    backend: AttentionBackend = registry.import_implementation(spec)(context)
    return backend


@pytest.mark.parametrize("name", ["sdpa", "fi", "fa"])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("phase", list(Phase), ids=lambda phase: phase.value)
def test_every_phase_agrees_with_attention_written_out(
    name: str, heads: int, dtype: torch.dtype, phase: Phase
) -> None:
    for page_size in (1, 16, 64):
        case = make(phase, cases.around(phase, page_size), page_size, heads, dtype)
        backend = build(name, case)
        cases.check(backend, case, LAYER)
        # A plan that is made while the one before it has not run yet.
        plans = [backend.plan(case.step) for _ in range(2)]
        wanted, layer = cases.expected(case, LAYER)[0], evolve(LAYER, out_dim=RANK)
        for plan in plans:
            out = layer.empty_output(case.q)
            backend.forward(case.q, layer, plan, out)
            cases.compare(out, wanted)
        backend.close()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json of the small model; its weights are noise."""
    folder = tmp_path_factory.mktemp("deepseek")
    (folder / "config.json").write_text(json.dumps(HF), encoding="utf-8")
    return folder


def answers(directory: Path, **settings: Any) -> Iterator[tuple[list[int], list[float]]]:
    """The greedy tokens of each prompt, and how far each is ahead of the second best."""
    fixed = {"device": "cuda", "dtype": "bfloat16", "load_format": "dummy", "max_seq_len": 512}
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
    with LLM(str(directory), **fixed, **settings) as llm:
        for output in llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params):
            best = [
                sorted((each.logprob for each in step.values()), reverse=True)
                for step in output.outputs[0].logprobs
            ]
            yield output.outputs[0].token_ids, [first - second for first, second, *_ in best]


@pytest.mark.parametrize(
    "settings",
    [
        {"attn": "fi", "runner": "eager"},
        {"attn": "fi", "max_batch_tokens": 64, "max_running_requests": 5},
        {"attn": "sdpa", "ops": "triton"},
        {"attn": "fi", "ops": "triton", "page_size": 16},
        {"attn": "fi", "runner": "cudagraph"},
        {"attn": "fi", "runner": "cudagraph", "page_size": 16, "max_running_requests": 5},
        {"attn": "fa", "runner": "eager"},
        {"attn": "fa", "runner": "cudagraph", "max_running_requests": 5},
        {"attn": "fa", "runner": "cudagraph", "ops": "triton", "page_size": 16},
    ],
    ids=str,
)
def test_a_small_deepseek_makes_the_same_tokens(settings: dict[str, Any], directory: Path) -> None:
    try:
        found = list(answers(directory, **settings))
    except HeadstockError as error:
        if "not installed" in str(error):
            pytest.skip(str(error))
        raise
    wanted, num_compared = list(answers(directory, attn="sdpa", ops="torch")), 0
    for (tokens, _), (expected, margins) in zip(found, wanted, strict=True):
        for at, token in enumerate(tokens):
            if token != expected[at]:
                assert margins[at] < NEAR, f"token {at}, {margins[at]} ahead"
                break
            num_compared += 1
    # Rows that part at once would show nothing.
    assert num_compared >= LEAST_COMPARED
