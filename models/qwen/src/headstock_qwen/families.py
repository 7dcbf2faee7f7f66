"""How config.json is read for each family."""

from __future__ import annotations

from headstock.nn.config import Json, decoder_config, flag, layer_count, layer_windows, positive, whole
from headstock.nn.decoder import decoder
from headstock.spi import Experts, ModelConfig


def qwen2(hf: Json) -> ModelConfig:
    """Qwen2: biases on queries, keys and values."""
    return decoder_config(hf, "Qwen2ForCausalLM", windows=layer_windows(hf), qkv_bias=True)


def qwen3(hf: Json) -> ModelConfig:
    """Qwen3: normalized queries and keys, heads of 128 unless it says otherwise."""
    bias = flag(hf, "attention_bias", False)
    return decoder_config(
        hf,
        "Qwen3ForCausalLM",
        windows=layer_windows(hf),
        default_head_dim=128,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
    )


def qwen3_moe(hf: Json) -> ModelConfig:
    """Qwen3-MoE: as Qwen3, with experts in most layers and one window for all layers."""
    bias = flag(hf, "attention_bias", False)
    window = positive(hf, "sliding_window", 4096) if flag(hf, "use_sliding_window", False) else None
    return decoder_config(
        hf,
        "Qwen3MoeForCausalLM",
        windows=[window] * layer_count(hf),
        experts=layer_experts(hf),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
    )


def layer_experts(hf: Json) -> list[Experts | None]:
    """Each layer's experts: every `decoder_sparse_step`-th layer has some, unless `mlp_only_layers` names it."""
    # transformers 5 writes num_local_experts where earlier releases wrote num_experts.
    count = positive(hf, "num_local_experts" if hf.get("num_local_experts") is not None else "num_experts", 128)
    per_token = positive(hf, "num_experts_per_tok", 8)
    if per_token > count:
        raise ValueError(f"num_experts_per_tok is {per_token}, wanted at most the {count} experts there are")
    experts = Experts(
        count=count,
        per_token=per_token,
        intermediate=positive(hf, "moe_intermediate_size", 768),
        renormalize=flag(hf, "norm_topk_prob", False),
    )
    step, dense = whole(hf, "decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
    if step < 1 or not isinstance(dense, list | tuple):
        raise ValueError("decoder_sparse_step must be above 0 and mlp_only_layers a list of layer numbers")
    return [None if (index + 1) % step or index in dense else experts for index in range(layer_count(hf))]


QWEN2 = decoder(qwen2)
QWEN3 = decoder(qwen3)
QWEN3_MOE = decoder(qwen3_moe)
