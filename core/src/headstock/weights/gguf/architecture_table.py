"""The architectures that are read from GGUF files, and what published checkpoints call them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from attrs import field, frozen

OUTER_NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

_LLAMA_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_EXPERT_NAMES: Mapping[str, str] = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
"""Beginnings of names -> what published checkpoints call them, `{}` being an expert."""

_MIXTRAL_NAMES: Mapping[str, str] = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}

_DELTA_NAMES: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
}
"""Gated delta rules; a name with an ending, or of a tensor that has none, is a whole name."""

_DRAFT_NAMES: Mapping[str, str] = {
    "nextn.eh_proj": "mtp.fc",
    "nextn.enorm": "mtp.pre_fc_norm_embedding",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "mtp.norm",
}
"""Tensors of the first layer that guesses further tokens -> whole names."""

_SANDWICHED = {
    **_LLAMA_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Layers with norms before and after each part."""

WINDOW = "attention.sliding_window"
"""The key of how many tokens a layer with a window sees; 0 for all."""

_WHOLE_HEADS: Mapping[str, Any] = {"partial_rotary_factor": 1.0}
"""Unless a file has another part: without the field, a quarter is turned."""

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@frozen(kw_only=True)
class Architecture:
    """How a GGUF architecture is called elsewhere.

    family, model_type: those of its config.json
    names: what its layers hold, in published checkpoints
    draft_names: the same of tensors beside layers that guess further tokens
    has_pairs: whether rows of queries and keys are stored in the order of pairs
    has_offset: whether norms are stored with 1 added to their weights
    expert_width_field: that of how wide each expert is; empty where it is `intermediate_size`
    renormalizes: what `norm_topk_prob` is where it has experts; None where there is no such field
    settings: numbers of a file, by the field that they are in a config.json; a window of 0 is none
    fields: what files do not say, as it is in all models of the architecture
    scaled_layers: how many layers the one model has whose queries are scaled by the width that each
        head has of the stream, and not by their own
    turns_part: whether a part of each head may be turned
    has_factor_lists: whether positions have two lists of factors
    has_delta_rules: whether most layers have gated delta rules
    has_tiled_values: whether the values that a key head serves lie apart there
    """

    family: str
    model_type: str
    names: Mapping[str, str]
    draft_names: Mapping[str, str] = _NOTHING
    has_pairs: bool = False
    has_offset: bool = False
    expert_count_field: str = ""
    expert_width_field: str = "moe_intermediate_size"
    renormalizes: bool | None = None
    settings: Mapping[str, str] = _NOTHING
    fields: Mapping[str, Any] = _NOTHING
    scaled_layers: int = 0
    turns_part: bool = False
    has_factor_lists: bool = False
    has_delta_rules: bool = False
    has_tiled_values: bool = False
    is_moe: bool = field(init=False)

    @is_moe.default
    def _has_experts(self) -> bool:
        return bool(self.expert_count_field)


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        family="LlamaForCausalLM", model_type="llama", names=_LLAMA_NAMES, has_pairs=True
    ),
    "qwen2": Architecture(family="Qwen2ForCausalLM", model_type="qwen2", names=_LLAMA_NAMES),
    "qwen2moe": Architecture(
        family="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        names={**_LLAMA_NAMES, **_EXPERT_NAMES},
        expert_count_field="num_experts",
        renormalizes=False,
    ),
    "qwen3": Architecture(family="Qwen3ForCausalLM", model_type="qwen3", names=_LLAMA_NAMES),
    "qwen3moe": Architecture(
        family="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        names={**_LLAMA_NAMES, **_EXPERT_NAMES},
        expert_count_field="num_experts",
        renormalizes=True,
    ),
    "qwen3next": Architecture(
        family="Qwen3NextForCausalLM",
        model_type="qwen3_next",
        names={**_LLAMA_NAMES, **_DELTA_NAMES, **_EXPERT_NAMES},
        draft_names=_DRAFT_NAMES,
        has_offset=True,
        expert_count_field="num_experts",
        renormalizes=True,
        fields=_WHOLE_HEADS,
        turns_part=True,
        has_delta_rules=True,
    ),
    "qwen35": Architecture(
        family="Qwen3_5ForCausalLM",
        model_type="qwen3_5_text",
        names={**_LLAMA_NAMES, **_DELTA_NAMES},
        draft_names=_DRAFT_NAMES,
        has_offset=True,
        fields=_WHOLE_HEADS,
        turns_part=True,
        has_delta_rules=True,
        has_tiled_values=True,
    ),
    "qwen35moe": Architecture(
        family="Qwen3_5MoeForCausalLM",
        model_type="qwen3_5_moe_text",
        names={**_LLAMA_NAMES, **_DELTA_NAMES, **_EXPERT_NAMES},
        draft_names=_DRAFT_NAMES,
        has_offset=True,
        expert_count_field="num_experts",
        fields=_WHOLE_HEADS,
        turns_part=True,
        has_delta_rules=True,
        has_tiled_values=True,
    ),
    "gemma2": Architecture(
        family="Gemma2ForCausalLM",
        model_type="gemma2",
        names=_SANDWICHED,
        has_offset=True,
        settings={
            WINDOW: "sliding_window",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        scaled_layers=46,
    ),
    "gemma3": Architecture(
        family="Gemma3ForCausalLM",
        model_type="gemma3_text",
        names=_SANDWICHED,
        has_offset=True,
        settings={
            WINDOW: "sliding_window",
            "final_logit_softcapping": "final_logit_softcapping",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        fields={"sliding_window_pattern": 6, "rope_local_base_freq": 10000.0},
        scaled_layers=62,
    ),
    "phi3": Architecture(
        family="Phi3ForCausalLM",
        model_type="phi3",
        names={
            **_LLAMA_NAMES,
            "attn_qkv": "self_attn.qkv_proj",
            "ffn_up": "mlp.gate_up_proj",
        },
        settings={WINDOW: "sliding_window"},
        turns_part=True,
        has_factor_lists=True,
    ),
    "granite": Architecture(
        family="GraniteForCausalLM",
        model_type="granite",
        names=_LLAMA_NAMES,
        has_pairs=True,
        settings={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
    "smollm3": Architecture(
        family="SmolLM3ForCausalLM",
        model_type="smollm3",
        names=_LLAMA_NAMES,
        has_pairs=True,
        fields={"no_rope_layer_interval": 4},
    ),
    "olmo2": Architecture(
        family="Olmo2ForCausalLM",
        model_type="olmo2",
        names={
            **_LLAMA_NAMES,
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
}
"""The architectures that are read, by the name that files have for them."""

MIXTRAL = Architecture(
    family="MixtralForCausalLM",
    model_type="mixtral",
    names={**_LLAMA_NAMES, **_MIXTRAL_NAMES},
    has_pairs=True,
    expert_count_field="num_local_experts",
    expert_width_field="",
)
"""Files call it llama too, and it is known by its experts."""
