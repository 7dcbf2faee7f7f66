"""Families with sinks, heads of several sizes, or gated delta rules, and decoders that transformers
computes: in 16 bits, in graphs, under each backend that serves them, beside float32 step by step.

`HEADSTOCK_FAMILIES_DEVICE=cpu` tries the test without a GPU.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from headstock import LLM, SamplingParams
from headstock.errors import CannotRun
from headstock_conformance.model.parity import write

DEVICE = os.environ.get("HEADSTOCK_FAMILIES_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs an NVIDIA GPU"
)

COMMON = {
    "vocab_size": 512,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "max_position_embeddings": 1024,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt-oss": COMMON
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "sliding_window": 48,
    },
    "gemma-4": COMMON
    | {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "sliding_window": 48,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
    },
    "qwen3.5": COMMON
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "intermediate_size": 1024,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
    },
    "qwen3-next": COMMON
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "intermediate_size": 1024,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
    },
}
COMPUTED: dict[str, dict[str, Any]] = {
    "windows": COMMON
    | {
        "architectures": ["Cohere2ForCausalLM"],
        "model_type": "cohere2",
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "sliding_window": 48,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        "logit_scale": 1.0,
    },
    "experts": COMMON
    | {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "intermediate_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "learned positions": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 512,
        "n_embd": 512,
        "n_layer": 4,
        "n_head": 8,
        "n_positions": 1024,
        "initializer_range": 0.05,
        "tie_word_embeddings": False,
    },
    "partial rope": COMMON
    | {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "intermediate_size": 1024,
        "num_attention_heads": 8,
    },
    "sinks": MODELS["gpt-oss"],
}
"""Decoders that transformers computes, and no family but that of the sinks."""
EXPERTS = {"experts": ("grouped_mm", "batched_mm"), "sinks": ("grouped_mm", "batched_mm")}
"""transformers' implementations whose steps are replayed."""
BACKENDS = {
    "gpt-oss": ("fa", "fi", "fa,fi", "triton"),
    "gemma-4": ("fa+triton", "triton"),
    "qwen3.5": ("fa", "fi", "triton"),
    "qwen3-next": ("fa", "triton"),
}
COMPUTED_BACKENDS = dict.fromkeys(COMPUTED, ("fa", "fi", "triton"))
COMPUTING: dict[str, Any] = {"load_format": "auto", "model_impl": "transformers"}
PROMPTS = [[(7 * at + 3 * row) % 512 for at in range(1 + 29 * row)] for row in range(9)]
MAX_TOKENS = 24
TIMES = 2.5
"""How much farther from float32 an engine may be than one that rounds after each operation."""


def generate(folder: Path, rounds: int = 1, **settings: Any) -> tuple[list[Any], Any]:
    """The greedy outputs of all prompts at once, of the last round, and the engine's counts.

    Weights are noise unless the settings say otherwise.
    """
    sizes = {"num_pages": 512, "page_size": 16, "max_seq_len": 512, "max_running_requests": 8}
    plain = {"load_format": "dummy", "device": DEVICE}
    with LLM(str(folder), **(sizes | plain | settings)) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=8)
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        outputs = [llm.generate(prompts, params) for _ in range(rounds)][-1]
        stats = llm._session.engine.stats()
    return [output.outputs[0] for output in outputs], stats


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model without weights for each family."""
    made = {}
    for name, hf in MODELS.items():
        made[name] = tmp_path_factory.mktemp(name)
        (made[name] / "config.json").write_text(json.dumps(hf), encoding="utf-8")
    return made


class Reference:
    """What a family says in float32, operation by operation.

    rounding: how far it is from that in 16 bits, by the same operations
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        plain = {"attn": "sdpa", "ops": "torch", "runner": "eager"} | settings
        self.outputs = generate(folder, dtype="float32", **plain)[0]
        self.rounding = self.measure(generate(folder, dtype="bfloat16", **plain)[0])

    def measure(self, outputs: list[Any]) -> float:
        """The mean distance of log-probabilities, up to where the tokens before them differ."""
        distances = []
        for ours, wanted in zip(outputs, self.outputs, strict=True):
            for at, token in enumerate(wanted.token_ids):
                found = ours.logprobs[at].get(token)
                # What is not among the best eight is at least as far off as the last of these.
                ours_here = [each.logprob for each in ours.logprobs[at].values()]
                logprob = min(ours_here) if found is None else found.logprob
                distances.append(abs(logprob - wanted.logprobs[at][token].logprob))
                if ours.token_ids[at] != token:
                    break
        return sum(distances) / len(distances)

    def check(self, outputs: list[Any]) -> None:
        """Raise AssertionError where outputs are farther off than 16 bits explain."""
        assert self.measure(outputs) <= TIMES * self.rounding


class References(dict[str, Reference]):
    """One for each folder, made when a test first needs it."""

    def __init__(self, folders: dict[str, Path], **settings: Any) -> None:
        super().__init__()
        self.folders, self.settings = folders, settings

    def __missing__(self, name: str) -> Reference:
        self[name] = Reference(self.folders[name], **self.settings)
        return self[name]


@pytest.fixture(scope="module")
def references(folders: dict[str, Path]) -> References:
    """Those of families."""
    return References(folders)


CASES = [
    (name, attn, runner)
    for name, backends in BACKENDS.items()
    for attn in (backends if DEVICE == "cuda" else ("sdpa",))
    for runner in (("cudagraph", "eager") if DEVICE == "cuda" else ("eager",))
]

UNKNOWN_LENGTHS = ("mtp", "fi", "cudagraph")
"""Graphs in which drafts of the model's own are verified are refused to what plans on the host."""


@pytest.mark.feature("V4")
@pytest.mark.parametrize(("name", "attn", "runner"), CASES)
def test_replayed_steps_say_what_float32_says(
    name: str,
    attn: str,
    runner: str,
    folders: dict[str, Path],
    references: References,
) -> None:
    outputs, stats = generate(
        folders[name],
        dtype="bfloat16",
        attn=attn,
        runner=runner,
        max_batch_tokens=100,
        debug_canary=True,
    )

    references[name].check(outputs)
    if runner == "cudagraph":
        assert stats.replayed_steps > MAX_TOKENS


@pytest.mark.skipif(DEVICE != "cuda", reason="FlashInfer needs an NVIDIA GPU")
def test_own_drafts_are_refused_to_backends_that_plan_on_the_host(
    folders: dict[str, Path],
) -> None:
    proposer, attn, runner = UNKNOWN_LENGTHS
    with pytest.raises(CannotRun, match="lengths of the host"):
        generate(folders["qwen3.5"], attn=attn, runner=runner, proposer=proposer)


@pytest.mark.feature("V4", "V11")
@pytest.mark.parametrize(
    ("proposer", "name", "attn", "runner"),
    [
        (proposer, *case)
        for proposer in ("off", "ngram", "mtp")
        for case in CASES
        if case[0].startswith("qwen") and (proposer, *case[1:]) != UNKNOWN_LENGTHS
    ],
)
def test_states_are_taken_over_and_go_back(
    proposer: str,
    name: str,
    attn: str,
    runner: str,
    folders: dict[str, Path],
    references: References,
) -> None:
    outputs, stats = generate(
        folders[name],
        rounds=3,
        dtype="bfloat16",
        attn=attn,
        runner=runner,
        proposer=proposer,
        max_batch_tokens=100,
        snapshot_tokens=64,
        snapshot_ratio=0.8,
        debug_canary=True,
    )

    references[name].check(outputs)
    assert stats.cached_tokens > 1000
    assert (stats.draft_tokens > 0) == (proposer != "off")
    if runner == "cudagraph":
        assert stats.replayed_steps > 0


@pytest.fixture(scope="module")
def computed_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random checkpoint of each decoder: noise alone has norms that hide all else."""
    made = {}
    for name, hf in COMPUTED.items():
        made[name] = tmp_path_factory.mktemp("computed")
        write(made[name], hf)
    return made


@pytest.fixture(scope="module")
def computed_references(computed_folders: dict[str, Path]) -> References:
    """Those of decoders, with a loop over experts."""
    return References(computed_folders, opt=("transformers.experts=eager",), **COMPUTING)


@pytest.mark.feature("V4", "V12")
@pytest.mark.parametrize(
    ("name", "attn", "runner", "experts"),
    [
        (name, attn, runner, experts)
        for name, backends in COMPUTED_BACKENDS.items()
        for attn in (backends if DEVICE == "cuda" else ("sdpa",))
        for runner in (("cudagraph", "eager") if DEVICE == "cuda" else ("eager",))
        for experts in EXPERTS.get(name, ("auto",))
    ],
)
def test_replayed_steps_of_transformers_say_what_float32_says(
    name: str,
    attn: str,
    runner: str,
    experts: str,
    computed_folders: dict[str, Path],
    computed_references: References,
) -> None:
    outputs, stats = generate(
        computed_folders[name],
        dtype="bfloat16",
        attn=attn,
        runner=runner,
        max_batch_tokens=100,
        debug_canary=True,
        opt=(f"transformers.experts={experts}",),
        **COMPUTING,
    )

    computed_references[name].check(outputs)
    if runner == "cudagraph":
        assert stats.replayed_steps > MAX_TOKENS


@pytest.mark.feature("G11", "V12")
@pytest.mark.skipif(DEVICE != "cuda", reason="a CPU captures nothing")
def test_a_capture_that_reads_sizes_on_the_host_leaves_steps_without_graphs(
    computed_folders: dict[str, Path], computed_references: References
) -> None:
    # In float16 torch's grouped product reads there how many tokens each expert has.
    outputs, stats = generate(
        computed_folders["experts"],
        dtype="float16",
        attn="triton",
        runner="cudagraph",
        opt=("transformers.experts=grouped_mm",),
        **COMPUTING,
    )
    computed_references["experts"].check(outputs)
    assert stats.replayed_steps == 0
