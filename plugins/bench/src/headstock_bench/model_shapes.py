"""Published architectures that can be benchmarked with random weights, without a download.

Speed does not depend on the values of the weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attrs import frozen


@frozen(kw_only=True)
class ExpertShape:
    """Experts of every layer: their count, how many a token uses, and the width of one."""

    count: int
    per_token: int
    width: int


@frozen(kw_only=True)
class DeltaShape:
    """Gated delta rules in three of four layers: their heads, of 128 elements each."""

    key_heads: int
    value_heads: int


@frozen(kw_only=True)
class ModelShape:
    """The sizes of a Qwen3 model, as in its config.json; of Qwen3.5 where it has delta rules.

    fields: what config.json has beside these, or instead
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    tied: bool
    experts: ExpertShape | None = None
    delta: DeltaShape | None = None
    vocab: int = 151_936
    # entries of the tokenizer without special tokens; the rest of the vocabulary is padding
    words: int = 151_643
    max_position: int = 40_960
    rope_theta: float = 1_000_000
    fields: Mapping[str, Any] = MappingProxyType({})


_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "num_experts_per_tok": 4,
    "num_local_experts": 32,
    "output_router_logits": False,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
}

MODEL_SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {
        "demo": ModelShape(
            hidden=256,
            layers=6,
            heads=4,
            kv_heads=2,
            intermediate=704,
            tied=True,
            vocab=768,
            words=765,
            max_position=4096,
            rope_theta=10_000,
        ),
        "qwen3-0.6b": ModelShape(
            hidden=1024, layers=28, heads=16, kv_heads=8, intermediate=3072, tied=True
        ),
        "qwen3-8b": ModelShape(
            hidden=4096, layers=36, heads=32, kv_heads=8, intermediate=12_288, tied=False
        ),
        "qwen3-14b": ModelShape(
            hidden=5120, layers=40, heads=40, kv_heads=8, intermediate=17_408, tied=False
        ),
        # The sizes of Llama 3 70B, in the form of Qwen3: norms of heads, its own tokenizer.
        "dense-70b": ModelShape(
            hidden=8192, layers=80, heads=64, kv_heads=8, intermediate=28_672, tied=False
        ),
        "qwen3-30b-a3b": ModelShape(
            hidden=2048,
            layers=48,
            heads=32,
            kv_heads=4,
            intermediate=6144,
            tied=False,
            experts=ExpertShape(count=128, per_token=8, width=768),
        ),
        "qwen3.5-27b": ModelShape(
            hidden=5120,
            layers=64,
            heads=24,
            kv_heads=4,
            intermediate=17_408,
            tied=False,
            delta=DeltaShape(key_heads=16, value_heads=48),
            vocab=248_320,
            words=248_044,
        ),
        "qwen3.5-35b-a3b": ModelShape(
            hidden=2048,
            layers=40,
            heads=16,
            kv_heads=2,
            intermediate=512,
            tied=False,
            experts=ExpertShape(count=256, per_token=8, width=512),
            delta=DeltaShape(key_heads=16, value_heads=32),
            vocab=248_320,
            words=248_044,
        ),
        "gpt-oss-20b": ModelShape(
            hidden=2880,
            layers=24,
            heads=64,
            kv_heads=8,
            intermediate=2880,
            tied=False,
            vocab=201_088,
            words=199_998,
            max_position=131_072,
            rope_theta=150_000,
            fields=_GPT_OSS,
        ),
    }
)


def write_model_directory(shape: ModelShape, folder: Path) -> None:
    """Write a model directory without weights: a configuration and a byte-level tokenizer.

    writes: config.json, tokenizer.json, tokenizer_config.json
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(make_config(shape)))
    # Prompts are ids, but the timed work includes converting tokens to text.
    write_tokenizer(shape.words, folder)


def make_config(shape: ModelShape) -> dict[str, Any]:
    """The contents of config.json."""
    dense: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "bos_token_id": shape.words,
        "eos_token_id": shape.words + 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.max_position,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": "bfloat16",
        "transformers_version": "5.0.0",  # without it, the library warns of Mistral's tokenizers
        "vocab_size": shape.vocab,
    }
    if shape.delta is not None:
        return dense | _make_hybrid_fields(shape.delta, shape.experts)
    if shape.experts is None:
        return {**dense, **shape.fields}
    return dense | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": shape.experts.width,
        "norm_topk_prob": True,
        "num_experts": shape.experts.count,
        "num_experts_per_tok": shape.experts.per_token,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }


def _make_hybrid_fields(delta: DeltaShape, experts: ExpertShape | None) -> dict[str, Any]:
    """What Qwen3.5 has instead of the fields of Qwen3, or beside them."""
    kind = "Qwen3_5ForCausalLM" if experts is None else "Qwen3_5MoeForCausalLM"
    fields = {
        "architectures": [kind],
        "model_type": "qwen3_5_text" if experts is None else "qwen3_5_moe_text",
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "mtp_num_hidden_layers": 1,
        "partial_rotary_factor": 0.25,
    }
    if experts is None:
        return fields
    return fields | {
        "moe_intermediate_size": experts.width,
        "shared_expert_intermediate_size": experts.width,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
    }


def write_tokenizer(words: int, folder: Path) -> None:
    """Write a byte-level tokenizer of `words` entries and three special tokens, without merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    vocab |= {f"<t{index}>": index for index in range(len(vocab), words)}
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab |= {text: words + index for index, text in enumerate(special)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": special[2],
        "pad_token": special[0],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
