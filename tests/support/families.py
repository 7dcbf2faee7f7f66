"""Small checkpoints of every family with settings that are not neutral."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from headstock.spi import Model, ModelConfig, Ops, Params, Sample, Sampling, WeightKind
from headstock.weights import load_weights, read_config
from headstock_conformance.model.paged import Paged
from headstock_conformance.model.parity import SHAPE
from headstock_deepseek.biased import GLM4_MOE, HY_V3, MINIMAX_M2
from headstock_deepseek.families import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE
from headstock_gemma.families import GEMMA2, GEMMA3
from headstock_gemma.gemma4 import GEMMA4, GEMMA4_UNIFIED
from headstock_gpt_oss.families import GPT_OSS
from headstock_lfm2.families import LFM2, LFM2_MOE
from headstock_llama.families import MINISTRAL3
from headstock_llama.variants import (
    ERNIE,
    ERNIE_MOE,
    GRANITE,
    GRANITE_MOE,
    GRANITE_MOE_SHARED,
    MIXTRAL,
    SEED_OSS,
    SMOLLM3,
)
from headstock_olmo.families import EXAONE4, OLMO2, OLMO3
from headstock_phi.families import PHI3
from headstock_qwen.families import QWEN2_MOE
from headstock_qwen.hybrid import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT

FAMILIES: Mapping[str, tuple[str, Model]] = {
    "gemma2": ("Gemma2ForCausalLM", GEMMA2),
    "gemma3_text": ("Gemma3ForCausalLM", GEMMA3),
    "gemma4_text": ("Gemma4ForCausalLM", GEMMA4),
    "gemma4_unified_text": ("Gemma4UnifiedForCausalLM", GEMMA4_UNIFIED),
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
    "qwen3_5_text": ("Qwen3_5ForCausalLM", QWEN3_5),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", QWEN3_5_MOE),
    "qwen3_next": ("Qwen3NextForCausalLM", QWEN3_NEXT),
    "deepseek_v2": ("DeepseekV2ForCausalLM", DEEPSEEK_V2),
    "deepseek_v3": ("DeepseekV3ForCausalLM", DEEPSEEK_V3),
    "glm4_moe": ("Glm4MoeForCausalLM", GLM4_MOE),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", GLM4_MOE_LITE),
    "hy_v3": ("HYV3ForCausalLM", HY_V3),
    "minimax_m2": ("MiniMaxM2ForCausalLM", MINIMAX_M2),
    "olmo3": ("Olmo3ForCausalLM", OLMO3),
    "exaone4": ("Exaone4ForCausalLM", EXAONE4),
    "lfm2_moe": ("Lfm2MoeForCausalLM", LFM2_MOE),
    "granitemoe": ("GraniteMoeForCausalLM", GRANITE_MOE),
    "granitemoeshared": ("GraniteMoeSharedForCausalLM", GRANITE_MOE_SHARED),
    "ministral3": ("Ministral3ForCausalLM", MINISTRAL3),
    "gpt_oss": ("GptOssForCausalLM", GPT_OSS),
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
DELTA_SHAPE = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
SHARED_EXPERT = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
EXPERTS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_5_text": DELTA_SHAPE,
    "qwen3_5_moe_text": {**DELTA_SHAPE, **SHARED_EXPERT},
    "qwen3_next": {**DELTA_SHAPE, **SHARED_EXPERT},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "ernie4_5_moe": {
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 20,
        "moe_norm_min": 0.6,
    },
    "qwen2_moe": SHARED_EXPERT,
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
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "first_k_dense_replace": 1,
    },
    "glm4_moe_lite": {**LATENT_SHAPE, "n_routed_experts": 8, "num_experts_per_tok": 3},
    "hy_v3": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    "minimax_m2": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "lfm2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "granitemoe": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 5},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "granitemoeshared": {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 28,
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
WIDE_HEADS = {
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 5,
}
"""Three layers of two kinds."""
BESIDE_MLP = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 20,
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


def load_paged(
    directory: Path, family: Model, ops: Ops, length: int, quant: WeightKind | None = None
) -> Paged:
    """The model of the directory with a pool for one sequence of that length.

    quant: the numbers that its maps are quantized to
    """
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
        takes_format=ops.takes_format,
        quant=quant,
    )
    return Paged.new(family, config, params, ops, page_size=4, sequences=1, length=length)
