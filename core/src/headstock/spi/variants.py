"""What an operation must do beyond a plain decoder, by name."""

from __future__ import annotations

from enum import Enum

from headstock.spi.model_config import Activation, LayerConfig, ModelConfig, QkNorm, Scoring


class Variant(Enum):
    """What a decoder's configuration asks of an operation beyond Llama's.

    A plain decoder normalizes before each part, turns whole heads by one rope, gates by silu, adds
    what a part gives as it is, and weighs experts by a softmax.

    WIDE_NORM: norms have weights in float32, which multiply before the result is rounded
    NO_PRE_NORM: no norm before the part
    POST_NORM: a norm of what the part gives, before it is added
    SCALED_EMBEDDING: embeddings times a number
    VOCAB_SHARD: embeddings and output matrix are those of a part of the vocabulary
    SCALED_RESIDUAL: what the part gives times a number
    HEAD_QK_NORM: a norm of each head of queries and keys
    WHOLE_QK_NORM: a norm of all heads of queries together, and one of keys
    VALUE_NORM: a norm without a weight of each head of values
    LATENT: attention over latent vectors
    OUTPUT_GATE: what attention gives times the sigmoid of a map of the layer's input
    QUERY_SCALE: queries times a number by their positions
    KV_SCALES: keys and values are divided by numbers of the layer before they are stored
    NO_ROPE: the layer turns nothing
    PARTIAL_ROPE: the layer turns the first part of each head
    ROPE_BY_LAYER: the model has several ropes
    SIZES_BY_LAYER: the layer has sizes of its own, which are not those of `ModelConfig`
    GELU, GELU_TANH: the gate's activation
    SHARED_EXPERT, GATED_SHARED_EXPERT: one that every token uses, and its gate
    BIASED_CHOICE: experts are chosen by their probability plus a bias
    NORM_FLOOR: the sum that weights are divided by has a lower bound
    SIGMOID_SCORES: each expert's probability is the sigmoid of its score
    WIDE_SCORES: scores of experts are computed in float32
    GROUPED_CHOICE: groups of experts are chosen before experts
    SCALED_WEIGHTS: weights of experts times a number
    SCORE_BIAS, EXPERT_BIAS: scores of experts have a bias, and the maps of an expert
    CLAMPED_GATE: an expert's gate is a `ClampedGate`
    EXPERT_SCALES: a weight of an expert times a number of that expert
    BESIDE_MLP: experts beside a dense feed-forward part, as `Experts.beside_mlp` says
    LAYER_SCALAR: the stream times a number after the layer
    EXPERT_SHARD: the rank has some of the experts; what the others make is added by other ranks
    HEAD_SCALE, HEAD_SOFTCAP: scores times a number, and bounded
    """

    WIDE_NORM = "wide-norm"
    NO_PRE_NORM = "no-pre-norm"
    POST_NORM = "post-norm"
    SCALED_EMBEDDING = "scaled-embedding"
    VOCAB_SHARD = "vocab-shard"
    SCALED_RESIDUAL = "scaled-residual"
    HEAD_QK_NORM = "head-qk-norm"
    WHOLE_QK_NORM = "whole-qk-norm"
    VALUE_NORM = "value-norm"
    LATENT = "latent"
    OUTPUT_GATE = "output-gate"
    QUERY_SCALE = "query-scale"
    KV_SCALES = "kv-scales"
    NO_ROPE = "no-rope"
    PARTIAL_ROPE = "partial-rope"
    ROPE_BY_LAYER = "rope-by-layer"
    SIZES_BY_LAYER = "sizes-by-layer"
    GELU = "gelu"
    GELU_TANH = "gelu-tanh"
    SHARED_EXPERT = "shared-expert"
    GATED_SHARED_EXPERT = "gated-shared-expert"
    BIASED_CHOICE = "biased-choice"
    NORM_FLOOR = "norm-floor"
    SIGMOID_SCORES = "sigmoid-scores"
    WIDE_SCORES = "wide-scores"
    GROUPED_CHOICE = "grouped-choice"
    SCALED_WEIGHTS = "scaled-weights"
    SCORE_BIAS = "score-bias"
    EXPERT_BIAS = "expert-bias"
    CLAMPED_GATE = "clamped-gate"
    EXPERT_SCALES = "expert-scales"
    BESIDE_MLP = "beside-mlp"
    LAYER_SCALAR = "layer-scalar"
    EXPERT_SHARD = "expert-shard"
    HEAD_SCALE = "head-scale"
    HEAD_SOFTCAP = "head-softcap"


def find_variants(
    operation: str, config: ModelConfig, layer: LayerConfig | None
) -> frozenset[Variant]:
    """What the operation must do beyond a plain decoder, in this layer or (None) outside layers.

    Later revisions name further variants for what configurations may ask then.
    raises: ValueError for an operation of layers without a layer
    """
    if operation == "embed":
        variants = _embed_variants(config)
    elif operation == "final_norm":
        variants = _norm_variants(config)
    elif operation in ("lm_head", "lm_head_sample"):
        variants = _head_variants(config)
    elif layer is None:
        raise ValueError(f"{operation!r}: expected the layer's configuration, got None")
    else:
        variants = _layer_variants(operation, config, layer)
    return frozenset(variant for variant, is_asked in variants.items() if is_asked)


def _norm_variants(config: ModelConfig) -> dict[Variant, bool]:
    return {Variant.WIDE_NORM: config.wide_norms or config.norm_offset}


def _embed_variants(config: ModelConfig) -> dict[Variant, bool]:
    # The first layer's norm as well, because a set may fuse it with the look-up.
    return {
        **_norm_variants(config),
        Variant.SCALED_EMBEDDING: config.embedding_scale != 1,
        Variant.VOCAB_SHARD: config.shard.count > 1,
        Variant.NO_PRE_NORM: not config.pre_norm,
    }


def _head_variants(config: ModelConfig) -> dict[Variant, bool]:
    return {
        Variant.VOCAB_SHARD: config.shard.count > 1,
        Variant.HEAD_SCALE: config.head.scale != 1,
        Variant.HEAD_SOFTCAP: config.head.softcap != 0,
    }


def _layer_variants(operation: str, config: ModelConfig, layer: LayerConfig) -> dict[Variant, bool]:
    sizes = config.sizes_of(layer)
    own_sizes = {Variant.SIZES_BY_LAYER: sizes != config.sizes}
    added = {
        Variant.POST_NORM: config.post_norm,
        Variant.SCALED_RESIDUAL: config.residual_scale != 1,
    }
    latent = {Variant.LATENT: layer.latent is not None}
    if operation == "attn_out":
        added |= {Variant.OUTPUT_GATE: layer.has_gate}
        return added | latent | own_sizes | (_norm_variants(config) if config.post_norm else {})
    variants = {**_norm_variants(config), Variant.NO_PRE_NORM: not config.pre_norm}
    if operation == "qkv_rope_store":
        rope = None if layer.rope is None else config.ropes[layer.rope]
        return (variants | latent | own_sizes) | {
            Variant.HEAD_QK_NORM: config.qk_norm is QkNorm.HEAD,
            Variant.WHOLE_QK_NORM: config.qk_norm is QkNorm.WHOLE,
            Variant.VALUE_NORM: config.value_norm,
            Variant.QUERY_SCALE: config.query_scale is not None,
            Variant.KV_SCALES: layer.k_scale != 1 or layer.v_scale != 1,
            Variant.NO_ROPE: rope is None,
            Variant.PARTIAL_ROPE: rope is not None and rope.dim < sizes.head_dim,
            Variant.ROPE_BY_LAYER: len(config.ropes) > 1,
        }
    if operation in ("short_conv", "delta_rule"):
        return variants | added
    variants |= added | {
        Variant.LAYER_SCALAR: layer.scalar is not None,
        # The sizes of experts are in `Experts`.
        Variant.SIZES_BY_LAYER: operation == "mlp" and sizes != config.sizes,
        Variant.GELU: config.activation is Activation.GELU,
        Variant.GELU_TANH: config.activation is Activation.GELU_TANH,
    }
    if operation == "moe" and layer.experts is not None:
        experts = layer.experts
        variants |= {
            Variant.SHARED_EXPERT: experts.shared > 0,
            Variant.GATED_SHARED_EXPERT: experts.shared_gate,
            Variant.BIASED_CHOICE: experts.choice_bias,
            Variant.NORM_FLOOR: experts.norm_floor > 0,
            Variant.SIGMOID_SCORES: experts.scoring is Scoring.SIGMOID,
            Variant.WIDE_SCORES: experts.wide_scores,
            Variant.GROUPED_CHOICE: experts.groups > 1,
            Variant.SCALED_WEIGHTS: experts.scale != 1,
            Variant.SCORE_BIAS: experts.score_bias,
            Variant.EXPERT_BIAS: experts.bias,
            Variant.CLAMPED_GATE: experts.gate is not None,
            Variant.EXPERT_SCALES: experts.has_scales,
            Variant.BESIDE_MLP: experts.beside_mlp,
            Variant.EXPERT_SHARD: experts.held > 0,
        }
    return variants
