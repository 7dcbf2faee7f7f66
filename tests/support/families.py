"""Small checkpoints of every family with settings that are not neutral."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from headstock.spi import Model, ModelConfig, Ops, Params, Sample, Sampling
from headstock.weights import load_weights, read_config
from headstock_conformance.model.paged import Paged
from headstock_conformance.model.parity import SHAPE
from headstock_deepseek.families import DEEPSEEK_V2, DEEPSEEK_V3
from headstock_gemma.families import GEMMA2, GEMMA3
from headstock_lfm2.families import LFM2
from headstock_llama.variants import ERNIE, ERNIE_MOE, GRANITE, MIXTRAL, SEED_OSS, SMOLLM3
from headstock_olmo.families import OLMO2
from headstock_phi.families import PHI3
from headstock_qwen.families import QWEN2_MOE

FAMILIES: Mapping[str, tuple[str, Model]] = {
    "gemma2": ("Gemma2ForCausalLM", GEMMA2),
    "gemma3_text": ("Gemma3ForCausalLM", GEMMA3),
    "phi3": ("Phi3ForCausalLM", PHI3),
    "mixtral": ("MixtralForCausalLM", MIXTRAL),
    "granite": ("GraniteForCausalLM", GRANITE),
    "smollm3": ("SmolLM3ForCausalLM", SMOLLM3),
    "olmo2": ("Olmo2ForCausalLM", OLMO2),
    "ernie4_5": ("Ernie4_5ForCausalLM", ERNIE),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", ERNIE_MOE),
    "seed_oss": ("SeedOssForCausalLM", SEED_OSS),
    "qwen2_moe": ("Qwen2MoeForCausalLM", QWEN2_MOE),
    "lfm2": ("Lfm2ForCausalLM", LFM2),
    "deepseek_v2": ("DeepseekV2ForCausalLM", DEEPSEEK_V2),
    "deepseek_v3": ("DeepseekV3ForCausalLM", DEEPSEEK_V3),
}
"""`model_type` -> architecture and family."""

LATENT_SHAPE = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 20,
}
EXPERTS: Mapping[str, Mapping[str, Any]] = {
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "ernie4_5_moe": {
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 20,
        "moe_norm_min": 0.6,
    },
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
    },
    "deepseek_v2": {
        **LATENT_SHAPE,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {
        **LATENT_SHAPE,
        "n_routed_experts": 12,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
    },
}

NEW = {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}
OLD = {"rope_theta": 300.0, "rope_scaling": {"type": "linear", "factor": 3.0}}
SHORT, LONG = [1.0 + index / 9 for index in range(8)], [2.0 + index for index in range(8)]
ORIGINAL = {"original_max_position_embeddings": 16}
LONGROPE = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}
HALF_LISTS = {"short_factor": SHORT[:4], "long_factor": LONG[:4]}
NESTED = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 700.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
GEMMA2_CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4,
    "beta_slow": 1,
    "mscale": 0.6,
    "mscale_all_dim": 1.4,
}
GRANITE_FACTORS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.5,
}
CONV_FIRST = ["conv", "full_attention", "conv"]


@frozen
class Case:
    """A family with changes to its configuration, as config.json has them."""

    model_type: str
    changes: Mapping[str, Any] = field(factory=dict)

    def __str__(self) -> str:
        return f"{self.model_type} {' '.join(map(str, self.changes))}"

    @property
    def family(self) -> Model:
        """What reads it."""
        return FAMILIES[self.model_type][1]

    @property
    def hf(self) -> dict[str, Any]:
        """The whole of config.json."""
        small = {name: value for name, value in SHAPE.items() if "expert" not in name}
        small.pop("moe_intermediate_size", None)
        if self.model_type == "phi3":  # its classes know no head_dim
            small |= {"hidden_size": 64}
            del small["head_dim"]
        if "kv_lora_rank" in EXPERTS.get(self.model_type, {}):
            del small["head_dim"]
        return {
            "model_type": self.model_type,
            "architectures": [FAMILIES[self.model_type][0]],
            **small,
            "num_hidden_layers": 3,
            "pad_token_id": 0,
            **EXPERTS.get(self.model_type, {}),
            **self.changes,
        }


DRAWS = 10_000

CASES = (
    Case("gemma2", {**GEMMA2_CAPS, "sliding_window": 5, **NEW}),
    Case("gemma2", {**GEMMA2_CAPS, "query_pre_attn_scalar": 5, "sliding_window": 7, **OLD}),
    Case(
        "gemma2",
        {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "hidden_activation": "gelu",
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 6,
            "head_dim": 64,
        },
    ),
    Case("gemma3_text", {"sliding_window": 5, "sliding_window_pattern": 2, "rope_theta": 900.0}),
    Case(
        "gemma3_text",
        {
            "sliding_window": 4,
            "rope_parameters": NESTED,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "final_logit_softcapping": 2.0,
            "attn_logit_softcapping": 1.0,
            "query_pre_attn_scalar": 3,
        },
    ),
    Case(
        "gemma3_text",
        {
            "sliding_window": 6,
            "sliding_window_pattern": 3,
            "rope_theta": 400.0,
            "rope_local_base_freq": 60.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "tie_word_embeddings": False,
            "attention_bias": True,
            "head_dim": 256,
        },
    ),
    Case("phi3", {"sliding_window": 5, "rope_theta": 400.0}),
    Case(
        "phi3",
        {
            "partial_rotary_factor": 0.75,
            "num_key_value_heads": None,
            "num_attention_heads": 2,
            "hidden_size": 256,
            "initializer_range": 0.1,  # smaller weights in a wider model
            **NEW,
        },
    ),
    Case("phi3", {"rope_scaling": {**LONGROPE, **ORIGINAL, "type": "su"}}),
    Case("phi3", {"rope_parameters": LONGROPE, **ORIGINAL}),
    Case("phi3", {"rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.5, **HALF_LISTS}}),
    Case(
        "phi3",
        {
            "rope_scaling": {**LONGROPE, **ORIGINAL, "type": "yarn", "factor": 5.0},
            "tie_word_embeddings": True,
            **ORIGINAL,
        },
    ),
    Case("phi3", {"rope_scaling": {**LONGROPE, "attention_factor": 1.3}}),
    Case("mixtral", {"sliding_window": 5, "head_dim": 96, **NEW}),
    Case("mixtral", {"tie_word_embeddings": True, "head_dim": None, **OLD}),
    Case("granite", {**GRANITE_FACTORS, "attention_bias": True, "mlp_bias": True, **NEW}),
    Case("granite", {**GRANITE_FACTORS, "tie_word_embeddings": True, "head_dim": 64, **OLD}),
    Case("smollm3", {"no_rope_layers": [1, 0, 1], "attention_bias": True, "mlp_bias": True, **NEW}),
    Case("smollm3", {"no_rope_layer_interval": 2, "tie_word_embeddings": False, **OLD}),
    Case(
        "smollm3",
        {
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 5,
            "head_dim": 128,
        },
    ),
    Case("olmo2", {"attention_bias": True, "head_dim": 128, **NEW}),
    Case("olmo2", {"num_key_value_heads": None, "tie_word_embeddings": True, **OLD}),
    Case("ernie4_5", {"use_bias": True, **NEW}),
    Case("ernie4_5", {"tie_word_embeddings": False, "head_dim": 128, **OLD}),
    Case("ernie4_5", {"hidden_size": 16, "head_dim": 16}),  # matrices as wide as a head
    Case("ernie4_5_moe", {"moe_num_shared_experts": 1, "head_dim": 64, **NEW}),
    Case(
        "ernie4_5_moe",
        {
            "moe_num_shared_experts": 0,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 1,
            "moe_layer_interval": 2,
            "tie_word_embeddings": False,
            "hidden_act": "gelu",
            **OLD,
        },
    ),
    Case("seed_oss", {"attention_out_bias": True, "mlp_bias": True, **NEW}),
    Case("seed_oss", {"attention_bias": False, "tie_word_embeddings": True, "head_dim": 80, **OLD}),
    Case("qwen2_moe", {"norm_topk_prob": True, "mlp_only_layers": [1], **NEW}),
    Case("qwen2_moe", {"decoder_sparse_step": 2, "qkv_bias": False, "head_dim": 64, **OLD}),
    Case(
        "qwen2_moe",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 2,
            "tie_word_embeddings": True,
        },
    ),
    Case("deepseek_v2", {"attention_bias": True, "mlp_bias": True, "kv_lora_rank": 64, **NEW}),
    Case("deepseek_v2", {"q_lora_rank": None, "rope_scaling": YARN, "routed_scaling_factor": 1.7}),
    Case(
        "deepseek_v2",
        {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "tie_word_embeddings": True,
            "rms_norm_eps": 0.01,
            "attention_bias": True,
            "q_lora_rank": None,
            **OLD,
        },
    ),
    Case(
        "deepseek_v3",
        {"attention_bias": True, "rms_norm_eps": 0.01, "kv_lora_rank": 64, **NEW},
    ),
    Case("deepseek_v3", {"rope_scaling": YARN, "q_lora_rank": None, "tie_word_embeddings": True}),
    Case(
        "deepseek_v3",
        {
            "rope_interleave": False,
            "norm_topk_prob": False,
            "routed_scaling_factor": 0.6,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "hidden_act": "gelu",
            "rope_parameters": {**YARN, "rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    Case(
        "lfm2",
        {
            "layer_types": CONV_FIRST,
            "conv_bias": True,
            "conv_L_cache": 4,
            "norm_eps": 1e-3,
            "block_multiple_of": 10,
            "block_ffn_dim_multiplier": 1.3,
            **NEW,
        },
    ),
    Case(
        "lfm2",
        {
            "full_attn_idxs": [0, 2],
            "block_ff_dim": 44,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
            "head_dim": 64,
            **OLD,
        },
    ),
    Case(
        "lfm2",
        {
            "layer_types": ["full_attention", "conv", "conv"],
            "conv_L_cache": 2,
            "block_ffn_dim_multiplier": 2,
            "tie_embedding": False,
            "num_key_value_heads": 1,
        },
    ),
    Case("lfm2", {"full_attn_idxs": [1], "conv_L_cache": 9, "block_multiple_of": 14}),
)


def log_probabilities(
    directory: Path, family: Model, prompt: Sequence[int], ops: Ops, chunk: int | None = None
) -> Tensor:
    """What headstock makes of the prompt, `chunk` tokens a step.   returns: [tokens, vocab]"""
    length = len(prompt)
    paged, size = load_paged(directory, family, ops, length), chunk or length
    steps = [paged.step({0: prompt[start : start + size]}) for start in range(0, length, size)]
    return torch.cat(steps).log_softmax(-1)


def draws_are_true(directory: Path, ops: Ops, prompt: Sequence[int], expected: Tensor) -> None:
    """10,000 draws after the prompt are spread as these probabilities are, by Pearson's chi-square.

    expected: [vocab]
    raises: AssertionError when they are not, or when other temperatures would do as well
    """
    sample, best = draw(directory, ops, prompt, DRAWS)
    counts = sample.tokens.bincount(minlength=len(expected)).double()
    assert chi_square(counts, expected) < 2.5 * len(expected)
    assert chi_square(counts, (expected.log() / 0.8).softmax(0)) > 5 * len(expected)
    torch.testing.assert_close(
        sample.logprobs, expected.log()[sample.tokens], atol=1e-4, rtol=0, check_dtype=False
    )
    assert best.tokens.tolist() == [int(expected.argmax())]


def draw(directory: Path, ops: Ops, prompt: Sequence[int], count: int) -> tuple[Sample, Sample]:
    """So many draws after the prompt, with log-probabilities, and the best token."""
    paged = load_paged(directory, GEMMA2, ops, len(prompt))
    hidden = last_hidden(paged, prompt).expand(count, -1).contiguous()
    sampling = Sampling(
        temperature=torch.ones(count),
        seeds=torch.arange(count) * 7919,
        positions=torch.full((count,), len(prompt)),
        top_logprobs=0,
    )
    with torch.inference_mode():
        drawn = paged.ops.lm_head_sample(hidden, sampling)
        best = paged.ops.lm_head_sample(hidden[:1], Sampling())
    return drawn, best


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """Pearson's statistic; its mean is nearly the number of tokens where the draws are true."""
    wanted = probabilities.double() * counts.sum()
    return float(((counts - wanted) ** 2 / wanted).sum())


def last_hidden(paged: Paged, prompt: Sequence[int]) -> Tensor:
    """The hidden state of the prompt's last token.   returns: [1, hidden]"""
    seen: list[Tensor] = []

    def score(params: Params, config: ModelConfig, hidden: Tensor, ops: Ops) -> Tensor:
        seen.append(hidden)
        return hidden

    evolve(paged, model=evolve(paged.model, logits=score)).step({0: prompt})
    return seen[0][-1:]


def load_paged(directory: Path, family: Model, ops: Ops, length: int) -> Paged:
    """The model of the directory with a pool for one sequence of that length."""
    config = family.config(read_config(directory))
    specs = family.params(config)
    params = load_weights(
        directory,
        specs,
        config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_seq_len=length,
        prepare=ops.prepare,
    )
    return Paged.new(family, config, params, ops, page_size=4, sequences=1, length=length)
