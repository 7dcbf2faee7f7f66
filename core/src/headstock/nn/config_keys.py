"""The keys of config.json: harmless ones, ones that no decoder here serves, ones left unread."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from headstock.nn.config_fields import Json, quoted

HARMLESS = frozenset(
    (
        # what the model is called, and who wrote the file
        *(
            "architectures",
            "model_type",
            "_name_or_path",
            "name_or_path",
            "_commit_hash",
            "transformers_version",
            "is_llama_config",
        ),
        # how its author trained it
        *(
            "initializer_range",
            "attention_dropout",
            "hidden_dropout",
            "hidden_dropout_prob",
            "embd_pdrop",
        ),
        *(
            "resid_pdrop",
            "attn_pdrop",
            "attention_probs_dropout_prob",
            "classifier_dropout",
            "resid_dropout",
        ),
        *("dropout", "router_aux_loss_coef", "router_z_loss_coef", "pretraining_tp"),
        *("gradient_checkpointing", "output_router_logits", "neftune_noise_alpha"),
        # how to run it faster: the numbers are the same
        *(
            "use_cache",
            "chunk_size_feed_forward",
            "attn_implementation",
            "_attn_implementation",
            "torchscript",
        ),
        *(
            "_attn_implementation_autoset",
            "experts_implementation",
            "_flash_attn_2_enabled",
            "use_flash_attn",
        ),
        *(
            "use_flash_attention",
            "use_flash_attention_2",
            "low_cpu_mem_usage",
            "tf_legacy_loss",
            "use_bfloat16",
        ),
        *("cache_implementation", "transformers.js_config"),
        # how long texts were in training; `max_position_embeddings` is what counts
        *("max_sequence_length", "model_max_length", "seq_length"),
        # what a call gives back beside the scores, and heads of other tasks
        *(
            "output_attentions",
            "output_hidden_states",
            "return_dict",
            "use_return_dict",
            "num_labels",
            "id2label",
        ),
        *(
            "label2id",
            "problem_type",
            "finetuning_task",
            "task_specific_params",
            "tie_last_hidden_states",
        ),
        # special tokens of the tokenizer
        *(
            "bos_token_id",
            "pad_token_id",
            "sep_token_id",
            "cls_token_id",
            "mask_token_id",
            "unk_token_id",
        ),
        *(
            "decoder_start_token_id",
            "image_token_id",
            "video_token_id",
            "vision_start_token_id",
            "tokenizer_class",
        ),
        *("vision_end_token_id", "vision_token_id", "prefix"),
        # defaults of generation, which generation_config.json and the request decide
        *(
            "do_sample",
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "typical_p",
            "epsilon_cutoff",
            "eta_cutoff",
        ),
        *(
            "max_length",
            "min_length",
            "max_new_tokens",
            "min_new_tokens",
            "repetition_penalty",
            "length_penalty",
        ),
        *(
            "diversity_penalty",
            "encoder_repetition_penalty",
            "no_repeat_ngram_size",
            "encoder_no_repeat_ngram_size",
        ),
        *(
            "num_beams",
            "num_beam_groups",
            "early_stopping",
            "num_return_sequences",
            "bad_words_ids",
        ),
        *(
            "forced_bos_token_id",
            "forced_eos_token_id",
            "begin_suppress_tokens",
            "suppress_tokens",
            "output_scores",
        ),
        *("exponential_decay_length_penalty", "remove_invalid_values", "return_dict_in_generate"),
        *(
            "assistant_confidence_threshold",
            "assistant_lookbehind",
            "target_lookbehind",
            "num_assistant_tokens",
        ),
        *("num_assistant_tokens_schedule", "generation_config"),
        # the stored tensors decide: biases and layers that the family lacks are refused when the
        #     weights load
        *(
            "attention_bias",
            "qkv_bias",
            "mlp_bias",
            "use_bias",
            "bias",
            "attention_out_bias",
            "o_proj_bias",
            "lm_head_bias",
        ),
        *("num_nextn_predict_layers", "tie_encoder_decoder", "shared_expert_intermediate_size"),
        "is_quantized",
    )
)
"""What changes no number here, whatever its value."""

_HARMLESS_PREFIXES = ("unsloth_",)

_OFF = (None, False, 0)
_ONE = (None, 1)

_WINDOW_FIELDS = ("use_sliding_window", "max_window_layers")
"""Which layers have a window, where there is one."""

UNSERVED: Mapping[str, Collection[Any]] = {
    # other positions
    **dict.fromkeys(("rotary_pct", "rotary_percentage", "rope_ratio", "rope_pct"), _ONE),
    **dict.fromkeys(
        ("rope_interleaved", "rope_interleave", "rotary_interleaved", "interleaved_rope"), _OFF
    ),
    **dict.fromkeys(("alibi", "use_alibi", "use_mrope", "use_logn_attn", "use_dynamic_ntk"), _OFF),
    **dict.fromkeys(
        ("rope_local_base_freq", "local_rope_theta", "global_rope_theta", "rotary_dim"), _OFF
    ),
    **dict.fromkeys(
        ("no_rope_layers", "no_rope_layer_interval", "nope_layer_interval"), (*_OFF, [])
    ),
    "position_embedding_type": (None, "rope"),
    # positions are divided by it
    **dict.fromkeys(("compression_ratio", "interpolate_factor"), _ONE),
    # other attention
    **dict.fromkeys(("attn_logit_softcapping", "attn_logit_softcap", "attention_logit_cap"), _OFF),
    **dict.fromkeys(
        ("clip_qkv", "attention_chunk_size", "attn_temperature_tuning", "query_pre_attn_scalar"),
        _OFF,
    ),
    **dict.fromkeys(
        ("attention_multiplier", "attention_scale", "attn_scale", "softmax_scale"), _OFF
    ),
    **dict.fromkeys(
        ("scale_attn_by_inverse_layer_idx", "use_bidirectional_attention", "bidirectional"), _OFF
    ),
    **dict.fromkeys(
        ("sliding_window_pattern", "interleaved_sliding_window", "layer_group_size"), _OFF
    ),
    **dict.fromkeys(
        ("use_qk_norm", "qk_norm", "qk_layernorm", "use_qk_layernorm", "use_qk_l2norm"), _OFF
    ),
    # every so many layers see everything
    "full_attn_mod": _ONE,
    "scale_attn_weights": (None, True),
    "is_causal": (True,),  # transformers takes null for false
    # transformers attends to everything in a prompt, and to a window while it generates
    "sliding_window": (None,),
    # other arrangements of layers
    **dict.fromkeys(
        ("parallel_attn", "parallel_block", "use_parallel_residual", "use_parallel_block"), _OFF
    ),
    **dict.fromkeys(
        ("is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size"), _OFF
    ),
    **dict.fromkeys(("text_config", "vision_config", "audio_config"), (None,)),
    **dict.fromkeys(("per_layer_config", "pruned_heads"), (None, {})),
    # other activations
    **dict.fromkeys(("hidden_activation", "activation_function"), (None, "silu", "swish")),
    "activation": (None, "silu", "swish", "swiglu"),
    "use_rmsnorm": (None, True),
    # factors and caps
    **dict.fromkeys(
        ("final_logit_softcapping", "final_logit_softcap", "logit_softcapping", "logit_cap"), _OFF
    ),
    **dict.fromkeys(
        ("embedding_multiplier", "embedding_scale", "scale_emb", "residual_multiplier"), _ONE
    ),
    **dict.fromkeys(
        ("logits_scaling", "logit_scale", "lm_head_multiplier", "output_multiplier_scale"), _ONE
    ),
    **dict.fromkeys(
        ("scale_depth", "dim_model_base", "attention_value_scale", "scale_embeddings"), _OFF
    ),
    **dict.fromkeys(("routed_scaling_factor", "route_scale", "n_group", "topk_group"), _ONE),
    **dict.fromkeys(("scoring_func", "router_scoring_func"), (None, "softmax")),
    **dict.fromkeys(("moe_router_use_sigmoid", "use_expert_bias"), _OFF),
    "moe_gate": (None, "topk"),
}
"""What changes the numbers and no decoder here does -> the values with which it changes nothing."""


_TOWERS = {"vision_config": "images", "audio_config": "sound"}


def check_served(hf: Json, keys: Collection[str] = ()) -> None:
    """Raise ValueError when `hf` needs what no decoder here does; the family reads `keys`."""
    for name, neutral in UNSERVED.items():
        if name in hf and name not in keys and hf[name] not in neutral:
            if name in _TOWERS and isinstance(hf[name], Mapping):
                raise ValueError(
                    f"{name} is set, so the model takes {_TOWERS[name]} beside text, which no "
                    "family serves; choose a checkpoint of text alone"
                )
            wanted = " or ".join(map(json.dumps, neutral))
            raise ValueError(
                f"{name}: expected {wanted}, got {quoted(hf[name])}, which is not supported"
            )


def ignored_fields(hf: Json, keys: Collection[str], *, has_windows: bool = True) -> Iterator[str]:
    """The fields that may matter to their author and that a family, reading `keys`, ignores.

    has_windows: whether any layer has a window; fields that only place windows count for nothing
        where none does
    """
    known = {*keys, *HARMLESS, *UNSERVED}
    if not has_windows and not hf.get("use_sliding_window"):
        known.update(_WINDOW_FIELDS)
    for name, value in hf.items():
        if value is not None and name not in known and not name.startswith(_HARMLESS_PREFIXES):
            yield name
