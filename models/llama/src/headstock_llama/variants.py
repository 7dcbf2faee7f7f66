"""Read config.json for variants of Llama, which only differ in a few numbers or tensors."""

from __future__ import annotations

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
from headstock.nn.decoder_config import (
    complete_fields,
    decoder_config,
    read_head_dim,
    read_layer_count,
    read_layer_types,
    uniform_windows,
    windows_by_type,
)
from headstock.nn.parameters import TensorNames
from headstock.nn.rope_config import read_rope
from headstock.spi import Experts, Head, ModelConfig

MIXTRAL_NAMES = TensorNames(
    router="block_sparse_moe.gate",
    expert="block_sparse_moe.experts.{}.",
    expert_gate_up=("w1", "w3"),
    expert_down="w2",
)

GRANITE_MOE_NAMES = TensorNames(
    router="block_sparse_moe.router.layer",
    whole_gate_up="block_sparse_moe.input_linear.weight",
    whole_down="block_sparse_moe.output_linear.weight",
    shared_gate_up=("shared_mlp.input_linear",),
    shared_down="shared_mlp.output_linear",
)

ERNIE_NAMES = TensorNames(
    shared_gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    shared_down="mlp.shared_experts.down_proj",
    # A layer that predicts the token after the next.
    left_out=("model.mtp_",),
)
ERNIE_EXPERT_FIELDS = (
    *("moe_intermediate_size", "moe_k", "moe_num_experts", "moe_num_shared_experts"),
    *("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval", "moe_norm_min"),
    # the bias must exist for the weights to load
    "moe_use_aux_free",
)


def mixtral_config(hf: Json) -> ModelConfig:
    """Mixtral: experts in every layer, and one window for all layers or none."""
    hf = complete_fields(
        without_nulls(hf, "head_dim"), {"num_key_value_heads": 8, "rms_norm_eps": 1e-5}
    )
    window = None if hf.get("sliding_window") is None else read_positive(hf, "sliding_window")
    # transformers reads num_experts as another name of the same number.
    count = read_positive(hf, "num_experts" if "num_experts" in hf else "num_local_experts", 8)
    per_token = read_positive(hf, "num_experts_per_tok", 2)
    if per_token > count:
        raise ValueError(f"num_experts_per_tok: expected at most {count}, got {per_token}")
    experts = Experts(
        count=count,
        per_token=per_token,
        intermediate=read_positive(hf, "intermediate_size"),
        renormalize=True,
    )
    return decoder_config(
        hf,
        "MixtralForCausalLM",
        model_types=("mixtral",),
        fields=(
            *("sliding_window", "num_local_experts", "num_experts", "num_experts_per_tok"),
            "router_jitter_noise",
        ),
        windows=uniform_windows(hf, window),
        experts=[experts] * read_layer_count(hf),
        ropes=[read_rope(hf, read_head_dim(hf), default_theta=1e6)],
    )


def granite_config(hf: Json) -> ModelConfig:
    """Granite: factors of embeddings, attention scores, sums and logits."""
    return _read_granite(
        hf, "GraniteForCausalLM", "granite", ("mlp_bias",), mlp_bias=read_bias(hf, "mlp_bias")
    )


def granite_moe_config(hf: Json) -> ModelConfig:
    """Granite, mixture of experts: the factors of Granite, experts in every layer."""
    return _read_granite(
        hf,
        "GraniteMoeForCausalLM",
        "granitemoe",
        ("num_local_experts", "num_experts_per_tok"),
        experts=_read_granite_experts(hf),
    )


def granite_moe_shared_config(hf: Json) -> ModelConfig:
    """As Granite with experts, and one more that all tokens use."""
    shared = read_whole(hf, "shared_intermediate_size", 0)
    if shared < 0:
        raise ValueError(f"shared_intermediate_size: expected a width, or 0, got {shared}")
    return _read_granite(
        hf,
        "GraniteMoeSharedForCausalLM",
        "granitemoeshared",
        ("num_local_experts", "num_experts_per_tok", "shared_intermediate_size"),
        experts=evolve(_read_granite_experts(hf), shared=shared),
    )


def _read_granite_experts(hf: Json) -> Experts:
    """Experts that are weighed by softmax of their scores alone.   raises: ValueError"""
    count = read_positive(hf, "num_local_experts", 8)
    per_token = read_positive(hf, "num_experts_per_tok", 2)
    if per_token > count:
        raise ValueError(f"num_experts_per_tok: expected at most {count} experts, got {per_token}")
    return Experts(
        count=count,
        per_token=per_token,
        intermediate=read_positive(hf, "intermediate_size"),
        renormalize=True,
    )


def _read_granite(
    hf: Json,
    architecture: str,
    model_type: str,
    fields: tuple[str, ...],
    *,
    experts: Experts | None = None,
    mlp_bias: bool = False,
) -> ModelConfig:
    """Any of the families, with these experts in all layers.

    fields: what it reads beside the factors
    """
    hf = complete_fields(hf, {"num_key_value_heads": None})
    bias = read_bias(hf, "attention_bias")
    config = decoder_config(
        hf,
        architecture,
        model_types=(model_type,),
        fields=(
            *("attention_bias", "embedding_multiplier", "residual_multiplier"),
            *("attention_multiplier", "logits_scaling", *fields),
        ),
        experts=[experts] * read_layer_count(hf),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=mlp_bias,
        scale=read_number(hf, "attention_multiplier", 1.0),
    )
    return evolve(
        config,
        embedding_scale=read_number(hf, "embedding_multiplier", 1.0),
        residual_scale=read_number(hf, "residual_multiplier", 1.0),
        # Logits are divided by this number.
        head=Head(scale=1 / read_number(hf, "logits_scaling", 1.0)),
    )


def smollm3_config(hf: Json) -> ModelConfig:
    """SmolLM3: some layers without rope. Only these may have a window, unless `layer_types` says.

    In `no_rope_layers` 1 stands for a layer with rope.
    """
    hf = complete_fields(hf, {"num_key_value_heads": 4, "tie_word_embeddings": True})
    turned = _read_turned_layers(hf)
    is_sliding = read_flag(hf, "use_sliding_window", False) and hf.get("sliding_window") is not None
    window = read_positive(hf, "sliding_window") if is_sliding else None
    types = read_layer_types(hf)
    # transformers ignores sliding layers if windows are off.
    windows = (
        [None if is_turned else window for is_turned in turned]
        if types is None
        else windows_by_type(types, window)
    )
    bias = read_bias(hf, "attention_bias")
    return decoder_config(
        hf,
        "SmolLM3ForCausalLM",
        model_types=("smollm3",),
        fields=(
            *("attention_bias", "mlp_bias", "use_sliding_window", "sliding_window"),
            *("no_rope_layers", "no_rope_layer_interval"),
        ),
        windows=windows,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=read_bias(hf, "mlp_bias"),
        ropes=[read_rope(hf, read_head_dim(hf), default_theta=2e6)],
        layer_ropes=[0 if is_turned else None for is_turned in turned],
    )


def _read_turned_layers(hf: Json) -> list[bool]:
    """Which layers have rope: all but every fourth, or as listed in `no_rope_layers`."""
    count, flags = read_layer_count(hf), hf.get("no_rope_layers")
    if flags is None:
        interval = read_positive(hf, "no_rope_layer_interval", 4)
        return [(index + 1) % interval != 0 for index in range(count)]
    if not isinstance(flags, list) or len(flags) != count or not all(f in (0, 1) for f in flags):
        raise ValueError(f"no_rope_layers: expected {count} entries of 0 or 1, got {quoted(flags)}")
    return [bool(flag) for flag in flags]


def seed_oss_config(hf: Json) -> ModelConfig:
    """Seed-OSS: biases on queries, keys and values, and heads of 128 by default."""
    hf = without_nulls(complete_fields(hf, {"num_key_value_heads": 8, "head_dim": 128}), "head_dim")
    return decoder_config(
        hf,
        "SeedOssForCausalLM",
        model_types=("seed_oss",),
        fields=("attention_bias", "attention_out_bias", "mlp_bias", "residual_dropout"),
        qkv_bias=read_bias(hf, "attention_bias", default=True),
        out_bias=read_bias(hf, "attention_out_bias"),
        mlp_bias=read_bias(hf, "mlp_bias"),
    )


def ernie_config(hf: Json) -> ModelConfig:
    """Ernie-4.5, dense: neighbouring elements of a head are rotated together."""
    defaults = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    hf = without_nulls(complete_fields(hf, defaults), "head_dim")
    bias = read_bias(hf, "use_bias")
    rope = read_rope(hf, read_head_dim(hf), default_theta=5e5, interleaved=True)
    return decoder_config(
        hf,
        "Ernie4_5ForCausalLM",
        model_types=("ernie4_5",),
        fields=("use_bias",),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        ropes=[rope],
    )


def ernie_moe_config(hf: Json) -> ModelConfig:
    """Ernie-4.5, mixture of experts: a bias affects which experts are selected, not their
    weights."""
    defaults = {
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "moe_norm_min": 1e-12,
    }
    hf = complete_fields(hf, defaults)
    # transformers then gives a bias to attention, dense parts, shared experts and scores, but not
    # to routed experts, although such checkpoints have theirs. None is published.
    if read_bias(hf, "use_bias"):
        raise ValueError("use_bias: expected false, got true, which is not supported")
    rope = read_rope(hf, read_head_dim(hf), default_theta=5e5, interleaved=True)
    experts = _read_ernie_experts(hf)
    return decoder_config(
        {name: value for name, value in hf.items() if name != _find_idle_capacity(hf, experts)},
        "Ernie4_5_MoeForCausalLM",
        model_types=("ernie4_5_moe",),
        fields=("use_bias", *ERNIE_EXPERT_FIELDS),
        experts=experts,
        ropes=[rope],
    )


def _read_ernie_experts(hf: Json) -> list[Experts | None]:
    """Each layer's experts: every `moe_layer_interval`-th layer from the start to the end index."""
    width = read_positive(hf, "moe_intermediate_size", 1536)
    shared = read_whole(hf, "moe_num_shared_experts", 2)
    if shared < 0:
        raise ValueError(f"moe_num_shared_experts: expected 0 or more, got {shared}")
    experts = Experts(
        count=read_positive(hf, "moe_num_experts", 64),
        per_token=read_positive(hf, "moe_k", 6),
        intermediate=width,
        renormalize=True,
        norm_floor=read_number(hf, "moe_norm_min"),
        choice_bias=True,
        shared=width * shared,
    )
    if experts.per_token > experts.count:
        raise ValueError(f"moe_k: expected at most {experts.count}, got {experts.per_token}")
    count = read_layer_count(hf)
    start, end = (
        read_whole(hf, "moe_layer_start_index", 1),
        read_whole(hf, "moe_layer_end_index", -1),
    )
    interval, last = read_positive(hf, "moe_layer_interval", 1), count - 1 if end == -1 else end
    return [
        experts if start <= index <= last and (index + 1) % interval == 0 else None
        for index in range(count)
    ]


def _find_idle_capacity(hf: Json, experts: list[Experts | None]) -> str:
    """`moe_capacity` if an expert has room for all tokens, so that it has no effect; or ""."""
    # An expert takes up to this multiple of the mean of all experts, and drops the rest.
    most = max((each.count for each in experts if each is not None), default=0)
    shares = hf.get("moe_capacity")
    is_idle = isinstance(shares, list) and all(
        type(share) in (int, float) and share >= most for share in shares
    )
    return "moe_capacity" if is_idle else ""


MIXTRAL = decoder(mixtral_config, MIXTRAL_NAMES)
GRANITE = decoder(granite_config)
GRANITE_MOE = decoder(granite_moe_config, GRANITE_MOE_NAMES)
GRANITE_MOE_SHARED = decoder(granite_moe_shared_config, GRANITE_MOE_NAMES)
SMOLLM3 = decoder(smollm3_config)
SEED_OSS = decoder(seed_oss_config)
ERNIE = decoder(ernie_config)
ERNIE_MOE = decoder(ernie_moe_config, ERNIE_NAMES)
