"""Read config.json for each family."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import evolve

from headstock.nn.config_fields import (
    Json,
    quoted,
    read_bias,
    read_flag,
    read_number,
    read_positive,
    read_whole,
    without_nulls,
)
from headstock.nn.decoder import decoder
from headstock.nn.decoder_config import complete_fields, decoder_config, read_layer_count
from headstock.nn.parameters import TensorNames
from headstock.nn.rope_config import read_rope
from headstock.spi import Experts, KVGroup, LatentAttention, ModelConfig, Rope, Scoring

NAMES = TensorNames(
    router_bias="mlp.gate.e_score_correction_bias",
    router_bias_shape=(),
    shared_gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    shared_down="mlp.shared_experts.down_proj",
    # Weights that predict tokens beyond the next one come after the layers, or have their own name.
    left_out=("model.layers.{}.", "mtp."),
)

LATENT_NORM_EPS = 1e-6
"""Eps of the norms of both compressed widths, independent of `rms_norm_eps`."""

LEAST_SUM = 1e-20
"""Published code adds this to the sum that weights are divided by; as a lower bound it gives the
same result for all sums above 1e-13.
"""

DEFAULTS: Json = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_key_value_heads": None,
}
V2_DEFAULTS: Json = {
    **DEFAULTS,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "norm_topk_prob": False,
}
V3_DEFAULTS: Json = {
    **DEFAULTS,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
}
GLM4_MOE_LITE_DEFAULTS: Json = {
    **DEFAULTS,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
}
"""Published files omit fields with the defaults of these transformers classes."""

FIELDS = (
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim"),
    *("v_head_dim", "attention_bias", "first_k_dense_replace", "moe_layer_freq"),
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("routed_scaling_factor", "n_group", "topk_group", "topk_method", "norm_topk_prob"),
    "scoring_func",
    # training settings of experts, and their number of devices
    *("aux_loss_alpha", "seq_aux", "ep_size"),
)


def deepseek_v2_config(hf: Json) -> ModelConfig:
    """DeepSeek-V2: experts selected by softmax, and groups by their best expert."""
    hf = complete_fields(hf, V2_DEFAULTS)
    check_choice(hf, "topk_method", ("greedy", "group_limited_greedy"))
    check_choice(hf, "scoring_func", ("softmax",))
    # transformers ignores it; DeepSeek's own code divides by the sum instead of using the factor.
    check_choice(hf, "norm_topk_prob", (False,))
    experts = read_experts(hf)
    if hf["topk_method"] != "greedy":
        experts = add_groups(hf, experts, 1)
    return _read_deepseek(
        hf,
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        ("mlp_bias",),
        experts,
        read_dense_start(hf),
        mlp_bias=read_bias(hf, "mlp_bias"),
    )


def deepseek_v3_config(hf: Json) -> ModelConfig:
    """DeepSeek-V3: experts selected by sigmoids and a bias, and groups by their best two
    experts."""
    hf = complete_fields(hf, V3_DEFAULTS)
    check_choice(hf, "topk_method", ("noaux_tc",))
    check_choice(hf, "scoring_func", ("sigmoid",))
    # This is the rotated part; transformers makes rotations of this width.
    check_choice(hf, "head_dim", (hf["qk_rope_head_dim"],))
    return _read_deepseek(
        hf,
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        ("rope_interleave",),
        read_biased_experts(hf),
        read_dense_start(hf),
        interleaved=read_flag(hf, "rope_interleave", True, may_be_null=True),
    )


def glm4_moe_lite_config(hf: Json) -> ModelConfig:
    """GLM-4.7-Flash: DeepSeek-V3 with other defaults, and experts in all layers but the first."""
    hf = {**GLM4_MOE_LITE_DEFAULTS, **hf}
    check_choice(hf, "topk_method", ("noaux_tc",))
    check_choice(hf, "scoring_func", ("sigmoid",))
    check_choice(hf, "head_dim", (hf["qk_rope_head_dim"],))
    sparse = read_sparse_layers(hf)
    # transformers does not read it.
    check_choice(hf, "first_k_dense_replace", (sparse.index(True) if any(sparse) else len(sparse),))
    return _read_deepseek(
        hf,
        "Glm4MoeLiteForCausalLM",
        "glm4_moe_lite",
        ("rope_interleave", "mlp_layer_types"),
        read_biased_experts(hf),
        sparse,
        interleaved=read_flag(hf, "rope_interleave", True, may_be_null=True),
    )


def read_dense_start(hf: Json) -> list[bool]:
    """Which layers have experts, where the first few are dense."""
    dense = read_whole(hf, "first_k_dense_replace")
    return [index >= dense for index in range(read_layer_count(hf))]


def read_sparse_layers(hf: Json) -> list[bool]:
    """Which layers have experts by `mlp_layer_types`; without it, all but the first.

    raises: ValueError
    """
    types, count = hf.get("mlp_layer_types"), read_layer_count(hf)
    if types is None:
        return [index > 0 for index in range(count)]
    if (
        not isinstance(types, list)
        or len(types) != count
        or not all(name in ("dense", "sparse") for name in types)
    ):
        raise ValueError(
            f"mlp_layer_types: expected {count} entries out of dense, sparse, got {quoted(types)}"
        )
    return [name == "sparse" for name in types]


def read_biased_experts(hf: Json) -> Experts:
    """Experts that are chosen by sigmoids and a bias, in groups."""
    return evolve(
        add_groups(hf, read_experts(hf), 2),
        renormalize=read_flag(hf, "norm_topk_prob", True, may_be_null=True),
        norm_floor=LEAST_SUM,
        choice_bias=True,
        scoring=Scoring.SIGMOID,
    )


def _read_deepseek(
    hf: Json,
    architecture: str,
    model_type: str,
    fields: tuple[str, ...],
    experts: Experts,
    sparse: Sequence[bool],
    *,
    interleaved: bool = True,
    mlp_bias: bool = False,
) -> ModelConfig:
    """Any of the families.

    fields: the fields it reads besides `FIELDS`
    sparse: which layers have these experts
    """
    check_choice(hf, "moe_layer_freq", (1,))
    _check_heads(hf)
    latent = LatentAttention(
        q_rank=None if hf["q_lora_rank"] is None else read_positive(hf, "q_lora_rank"),
        kv_rank=read_positive(hf, "kv_lora_rank"),
        nope_dim=read_positive(hf, "qk_nope_head_dim"),
        rope_dim=read_positive(hf, "qk_rope_head_dim"),
        v_dim=read_positive(hf, "v_head_dim"),
        norm_eps=LATENT_NORM_EPS,
    )
    rope = _read_rope(hf, latent.rope_dim, interleaved)
    bias = read_bias(hf, "attention_bias")
    count = read_layer_count(hf)
    config = decoder_config(
        # All heads read one vector; transformers' `head_dim` is its rotated part.
        {**hf, "num_key_value_heads": 1, "head_dim": latent.layout.dim},
        architecture,
        model_types=(model_type,),
        fields=(*FIELDS, *fields),
        experts=[experts if is_sparse else None for is_sparse in sparse],
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=mlp_bias,
        scale=(latent.nope_dim + latent.rope_dim) ** -0.5 * _read_mscale(rope) ** 2,
        ropes=[rope],
    )
    return evolve(
        config,
        layers=tuple(evolve(layer, latent=latent) for layer in config.layers),
        kv_groups=(KVGroup(layers=tuple(range(count)), layout=latent.layout),),
    )


def read_experts(hf: Json) -> Experts:
    """The fields of experts that both families share: weighed by softmax, in one group."""
    width = read_positive(hf, "moe_intermediate_size")
    shared = read_whole(hf, "n_shared_experts")
    count, per_token = (
        read_positive(hf, "n_routed_experts"),
        read_positive(hf, "num_experts_per_tok"),
    )
    if per_token > count:
        raise ValueError(f"num_experts_per_tok: expected at most {count}, got {per_token}")
    if shared < 0:
        raise ValueError(f"n_shared_experts: expected 0 or more, got {shared}")
    return Experts(
        count=count,
        per_token=per_token,
        intermediate=width,
        renormalize=False,
        shared=shared * width,
        wide_scores=True,
        scale=read_number(hf, "routed_scaling_factor"),
    )


def add_groups(hf: Json, experts: Experts, best: int) -> Experts:
    """The experts in groups, selected by the sum of their `best` experts."""
    count, per_token = experts.count, experts.per_token
    groups, chosen = read_positive(hf, "n_group"), read_positive(hf, "topk_group")
    if count % groups or count // groups < best:
        raise ValueError(
            f"n_group: expected a number that divides {count} experts into groups of at least "
            f"{best}, got {groups}"
        )
    if not per_token <= chosen * (count // groups) <= count:
        raise ValueError(
            f"topk_group: expected at most {groups} groups, with {per_token} experts or more in "
            f"all, got {chosen}"
        )
    return evolve(experts, groups=groups, groups_per_token=chosen, group_best=best)


def _read_rope(hf: Json, dim: int, interleaved: bool) -> Rope:
    """The rope of the rotated part.   raises: ValueError"""
    rope = read_rope(hf, dim, interleaved=interleaved, width_field="qk_rope_head_dim")
    table = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    # There, it multiplies attention scores for any rope type; here, only for YaRN.
    if rope.scaling not in ("default", "yarn") and table.get("mscale_all_dim"):
        raise ValueError(
            f"mscale_all_dim: expected it only with rope_type 'yarn', got "
            f"{quoted(table['mscale_all_dim'])} with {rope.scaling!r}"
        )
    return rope


def _read_mscale(rope: Rope) -> float:
    """YaRN's factor of queries and keys in addition to that of its rotations."""
    numbers = rope.parameters
    if "mscale_all_dim" not in numbers or numbers["factor"] <= 1:
        return 1.0
    return 0.1 * float(numbers["mscale_all_dim"]) * math.log(numbers["factor"]) + 1.0


def _check_heads(hf: Json) -> None:
    """Raise ValueError if the number of KV heads differs from that of query heads."""
    heads, kv_heads = hf.get("num_attention_heads"), hf["num_key_value_heads"]
    if kv_heads != heads:
        raise ValueError(
            f"num_key_value_heads: expected {quoted(heads)}, the same as num_attention_heads, got "
            f"{quoted(kv_heads)}"
        )


def check_choice(hf: Json, name: str, served: tuple[object, ...]) -> None:
    """Raise ValueError if the field is present with an unsupported value."""
    value = without_nulls(hf, name).get(name, served[0])
    if value not in served:
        wanted = " or ".join(map(quoted, served))
        raise ValueError(f"{name}: expected {wanted}, got {quoted(value)}, which is not supported")


DEEPSEEK_V2 = decoder(deepseek_v2_config, NAMES)
DEEPSEEK_V3 = decoder(deepseek_v3_config, NAMES)
GLM4_MOE_LITE = decoder(glm4_moe_lite_config, NAMES)
