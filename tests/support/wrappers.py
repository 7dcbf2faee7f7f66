"""Small checkpoints of models that take images or sound beside text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen
from families import BESIDE_MLP, DELTA_SHAPE, EXPERTS, WIDE_HEADS

TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "initializer_range": 0.02,
}
QWEN_VISION = {
    "hidden_size": 16,
    "embed_dim": 16,
    "out_hidden_size": 32,
    "intermediate_size": 16,
    "depth": 1,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
}
MROPE = {"type": "mrope", "mrope_section": [2, 1, 1], "rope_theta": 300.0}
MROPE3 = {
    "rope_type": "default",
    "mrope_interleaved": True,
    "mrope_section": [4, 2, 2],
    "rope_theta": 300.0,
}
MROPE3_5 = {**MROPE3, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
BETA = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 48,
    "llama_4_scaling_beta": 0.3,
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}


@frozen
class Wrapped:
    """A model with a text decoder and a tower, as config.json has it.

    text: changes to the fields of the decoder
    whole: changes to those of the whole
    """

    architecture: str
    model_type: str
    text_type: str
    vision: Mapping[str, Any]
    text: Mapping[str, Any] = field(factory=dict)
    whole: Mapping[str, Any] = field(factory=dict)
    image: int = 90

    def __str__(self) -> str:
        return " ".join([self.model_type, *self.text, *self.whole])

    @property
    def hf(self) -> dict[str, Any]:
        """The whole of config.json."""
        text = {"model_type": self.text_type, **TEXT, **self.text}
        if self.text_type.startswith("qwen2"):  # its heads divide the width
            del text["head_dim"]
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "text_config": text,
            "vision_config": dict(self.vision),
            "image_token_id": self.image,
            "eos_token_id": 2,
            **self.whole,
        }


GEMMA3 = ("Gemma3ForConditionalGeneration", "gemma3", "gemma3_text")
MISTRAL3 = ("Mistral3ForConditionalGeneration", "mistral3", "mistral")
QWEN2_VL = ("Qwen2VLForConditionalGeneration", "qwen2_vl", "qwen2_vl_text")
QWEN2_5_VL = ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", "qwen2_5_vl_text")
QWEN3_VL = ("Qwen3VLForConditionalGeneration", "qwen3_vl", "qwen3_vl_text")
QWEN3_VL_MOE = ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", "qwen3_vl_moe_text")
QWEN3_5 = ("Qwen3_5ForConditionalGeneration", "qwen3_5", "qwen3_5_text")
QWEN3_5_MOE = ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", "qwen3_5_moe_text")
# transformers computes prompts in chunks, whose rounding small norms would enlarge.
QWEN3_5_TEXT = {**DELTA_SHAPE, "rms_norm_eps": 0.1}
QWEN3_5_EXPERTS = {**EXPERTS["qwen3_5_moe_text"], "rms_norm_eps": 0.01}
GEMMA4 = ("Gemma4ForConditionalGeneration", "gemma4", "gemma4_text")
GEMMA4_UNIFIED = (
    "Gemma4UnifiedForConditionalGeneration",
    "gemma4_unified",
    "gemma4_unified_text",
)
GEMMA4_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 16,
}
GEMMA4_AUDIO = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "output_proj_dims": 16,
    "subsampling_conv_channels": [4, 4],
}
UNIFIED_VISION = {
    "mm_embed_dim": 16,
    "output_proj_dims": 16,
    "mm_posemb_size": 8,
    "patch_size": 2,
    "pooling_kernel_size": 1,
}
SIGLIP = {"model_type": "siglip_vision_model", **VISION}
PIXTRAL = {"model_type": "pixtral", **VISION}
LLAVA = ("LlavaForConditionalGeneration", "llava")
LLAVA_NEXT = ("LlavaNextForConditionalGeneration", "llava_next")
LLAVA_ONEVISION = ("LlavaOnevisionForConditionalGeneration", "llava_onevision", "qwen2")
IDEFICS3 = ("Idefics3ForConditionalGeneration", "idefics3", "llama")
SMOLVLM = ("SmolVLMForConditionalGeneration", "smolvlm", "llama")
INTERNVL = ("InternVLForConditionalGeneration", "internvl")
CLIP = {"model_type": "clip_vision_model", "projection_dim": 16, **VISION}
INTERN_VISION = {
    **VISION,
    "model_type": "internvl_vision",
    "image_size": [28, 28],
    "patch_size": [14, 14],
}
GLM4V_MOE = ("Glm4vMoeForConditionalGeneration", "glm4v_moe", "glm4v_moe_text")
GLM_VISION = {**QWEN_VISION, "num_hidden_layers": 1, "depth": 1, "image_size": 28}
GLM_EXPERTS = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
}
GLM_ROPE = {"rope_type": "default", "rope_theta": 300.0, "mrope_section": [1, 1, 0]}
IMAGE_INDEX = {"image_token_index": 90, "image_token_id": None}
GEMMA3_WHOLE = {"image_token_index": 90, "mm_tokens_per_image": 4}
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}

CASES = (
    Wrapped(
        *GEMMA3,
        SIGLIP,
        {"sliding_window": 5, "sliding_window_pattern": 2, "query_pre_attn_scalar": 7},
        GEMMA3_WHOLE,
    ),
    Wrapped(
        *GEMMA3,
        SIGLIP,
        {
            "sliding_window": 6,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "rope_theta": 400.0,
        },
        {**GEMMA3_WHOLE, "tie_word_embeddings": False},
    ),
    Wrapped(
        *GEMMA4,
        GEMMA4_VISION,
        {
            **WIDE_HEADS,
            **BESIDE_MLP,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 2.0,
            "use_bidirectional_attention": "vision",
        },
        {"audio_config": GEMMA4_AUDIO},
    ),
    Wrapped(
        *GEMMA4_UNIFIED,
        UNIFIED_VISION,
        {**WIDE_HEADS, "sliding_window": 6},
        {"tie_word_embeddings": False, "audio_config": {"audio_embed_dim": 8}},
    ),
    Wrapped(*MISTRAL3, PIXTRAL, {"sliding_window": None, "rope_theta": 500.0}),
    Wrapped(
        *MISTRAL3,
        PIXTRAL,
        {"sliding_window": 5},
        {"tie_word_embeddings": False, "dtype": "float32"},
    ),
    Wrapped(
        *MISTRAL3[:2], "ministral3", PIXTRAL, {"rope_parameters": {**BETA, "rope_theta": 99.0}}
    ),
    Wrapped(*QWEN2_VL, QWEN_VISION, {"rope_scaling": MROPE, **SLIDING}),
    Wrapped(*QWEN2_5_VL, QWEN_VISION, {"rope_scaling": MROPE}, {"tie_word_embeddings": True}),
    Wrapped(*QWEN2_5_VL, QWEN_VISION, {"rope_parameters": MROPE, "rms_norm_eps": 0.1, **SLIDING}),
    Wrapped(*QWEN3_VL, QWEN_VISION, {"rope_scaling": MROPE3, "attention_bias": True}),
    Wrapped(*QWEN3_VL, QWEN_VISION, {"rope_parameters": MROPE3}, {"tie_word_embeddings": True}),
    Wrapped(*QWEN3_VL_MOE, QWEN_VISION, {**MOE, "rope_parameters": MROPE3}),
    Wrapped(
        *QWEN3_VL_MOE,
        QWEN_VISION,
        {**MOE, "mlp_only_layers": [1], "norm_topk_prob": False, "head_dim": None},
        {"tie_word_embeddings": True},
    ),
    Wrapped(*QWEN3_5, QWEN_VISION, {**QWEN3_5_TEXT, "rope_parameters": MROPE3_5}),
    Wrapped(
        *QWEN3_5,
        QWEN_VISION,
        {**QWEN3_5_TEXT, "linear_num_value_heads": 2},
        {"tie_word_embeddings": True},
    ),
    Wrapped(*QWEN3_5_MOE, QWEN_VISION, {**QWEN3_5_EXPERTS, "rope_parameters": MROPE3_5}),
    Wrapped(*LLAVA, "llama", CLIP, {"rope_theta": 500.0, "attention_bias": True}, IMAGE_INDEX),
    Wrapped(*LLAVA, "mistral", PIXTRAL, {"sliding_window": 5}, {"tie_word_embeddings": True}),
    Wrapped(*LLAVA_NEXT, "mistral", CLIP, {"sliding_window": None}, IMAGE_INDEX),
    Wrapped(*LLAVA_NEXT, "llama", CLIP, {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    Wrapped(*LLAVA_ONEVISION, SIGLIP, SLIDING, {"tie_word_embeddings": True, **IMAGE_INDEX}),
    Wrapped(*IDEFICS3, VISION, {"rope_theta": 900.0}),
    Wrapped(*SMOLVLM, VISION, {"head_dim": 24}, {"tie_word_embeddings": True}),
    Wrapped(*INTERNVL, "qwen2", INTERN_VISION, SLIDING, {"tie_word_embeddings": False}),
    Wrapped(*INTERNVL, "qwen3", INTERN_VISION, {"attention_bias": True}),
    Wrapped(
        *GLM4V_MOE,
        GLM_VISION,
        {**GLM_EXPERTS, "rope_scaling": {"type": "default", "mrope_section": [2, 1, 1]}},
    ),
    Wrapped(
        *GLM4V_MOE,
        GLM_VISION,
        {
            **GLM_EXPERTS,
            "rope_parameters": {**GLM_ROPE, "partial_rotary_factor": 0.25},
            "n_group": 2,
            "attention_bias": False,
        },
        {"tie_word_embeddings": True},
    ),
)
