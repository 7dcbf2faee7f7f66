"""The decoder's parameters: names, shapes, and the Hugging Face tensors they are made of."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from headstock.nn.rope import rope_table
from headstock.spi import Experts, LayerConfig, ModelConfig, ParamSpec

NamedSpecs = Iterator[tuple[str, ParamSpec]]


def parameters(config: ModelConfig) -> dict[str, ParamSpec]:
    """Every parameter of the decoder, by name."""
    specs = dict(_outer_parameters(config))
    for layer in config.layers:
        specs |= _attention_parameters(config, layer)
        specs |= (
            _mlp_parameters(config, layer)
            if layer.experts is None
            else _moe_parameters(config, layer, layer.experts)
        )
    return specs


def _outer_parameters(config: ModelConfig) -> NamedSpecs:
    """Parameters outside layers."""
    # Checkpoints with tied embeddings often hold the same matrix twice; older ones the rope
    # frequencies too.
    twin = ("lm_head.weight",) if config.tied_embeddings else ()
    yield (
        "embed",
        ParamSpec(
            shape=(config.vocab, config.hidden),
            sources=(("model.embed_tokens.weight",),),
            copies=twin,
        ),
    )
    if not config.tied_embeddings:
        yield (
            "lm_head",
            ParamSpec(shape=(config.vocab, config.hidden), sources=(("lm_head.weight",),)),
        )
    yield "norm", _norm_spec(config.hidden, "model.norm.weight")
    yield (
        "rope",
        ParamSpec(
            shape=(config.max_position, 2, config.rope.dim // 2),
            dtype="float32",
            compute=_compute_rope,
            ignored=tuple(
                f"model.layers.{layer.index}.self_attn.rotary_emb.inv_freq"
                for layer in config.layers
            ),
        ),
    )


def _compute_rope(config: ModelConfig, max_seq_len: int) -> Tensor:
    """The rope table for `max_seq_len` positions.   returns: [max_seq_len, 2, dim / 2] float32"""
    return rope_table(config.rope, max_seq_len, config.max_position)


def _attention_parameters(config: ModelConfig, layer: LayerConfig) -> NamedSpecs:
    """Parameters of a layer's attention: q, k and v merged in this order."""
    source = f"model.layers.{layer.index}."
    width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    parts = (width, kv_width, kv_width)
    names = tuple(f"{source}self_attn.{name}_proj" for name in "qkv")
    yield f"{layer.prefix}attn_norm", _norm_spec(config.hidden, f"{source}input_layernorm.weight")
    # Merged, so that keys and values lie side by side in the product and one operation stores them.
    yield from _linear_specs(f"{layer.prefix}qkv", config.hidden, names, parts, config.qkv_bias)
    out = (f"{source}self_attn.o_proj",)
    yield from _linear_specs(
        f"{layer.prefix}attn_out",
        width,
        out,
        (config.hidden,),
        config.out_bias,
    )
    if config.qk_norm:
        # One row a head, so that queries and keys are normalized together.
        q, k = ((f"{source}self_attn.{name}_norm.weight",) for name in "qk")
        yield (
            f"{layer.prefix}qk_norm",
            ParamSpec(
                shape=(config.heads + config.kv_heads, config.head_dim),
                sources=(q,) * config.heads + (k,) * config.kv_heads,
                stacked=True,
                dummy=1.0,
            ),
        )


def _mlp_parameters(config: ModelConfig, layer: LayerConfig) -> NamedSpecs:
    """Parameters of a dense feed-forward part: gate and up merged in this order."""
    source, inner = f"model.layers.{layer.index}.mlp.", config.intermediate
    gate_up = (f"{source}gate_proj", f"{source}up_proj")
    yield _mlp_norm_spec(config, layer)
    yield from _linear_specs(
        f"{layer.prefix}gate_up",
        config.hidden,
        gate_up,
        (inner, inner),
        config.mlp_bias,
    )
    down = (f"{source}down_proj",)
    yield from _linear_specs(
        f"{layer.prefix}down",
        inner,
        down,
        (config.hidden,),
        config.mlp_bias,
    )


def _moe_parameters(config: ModelConfig, layer: LayerConfig, experts: Experts) -> NamedSpecs:
    """Parameters of a mixture of experts, from one tensor an expert or from one for all."""
    source, inner = f"model.layers.{layer.index}.mlp.", experts.intermediate
    prefixes = [f"{source}experts.{expert}." for expert in range(experts.count)]
    yield _mlp_norm_spec(config, layer)
    router = (f"{source}gate",)
    yield from _linear_specs(
        f"{layer.prefix}router",
        config.hidden,
        router,
        (experts.count,),
        False,
    )
    yield (
        f"{layer.prefix}experts_gate_up",
        ParamSpec(
            shape=(experts.count, 2 * inner, config.hidden),
            sources=tuple(
                (f"{name}gate_proj.weight", f"{name}up_proj.weight") for name in prefixes
            ),
            stacked=True,
            parts=(inner, inner),
            whole=f"{source}experts.gate_up_proj",
        ),
    )
    yield (
        f"{layer.prefix}experts_down",
        ParamSpec(
            shape=(experts.count, config.hidden, inner),
            sources=tuple((f"{name}down_proj.weight",) for name in prefixes),
            stacked=True,
            whole=f"{source}experts.down_proj",
        ),
    )


def _mlp_norm_spec(config: ModelConfig, layer: LayerConfig) -> tuple[str, ParamSpec]:
    """The norm before a layer's feed-forward part."""
    source = f"model.layers.{layer.index}.post_attention_layernorm.weight"
    return f"{layer.prefix}mlp_norm", _norm_spec(config.hidden, source)


def _norm_spec(width: int, source: str) -> ParamSpec:
    """A norm's weight."""
    return ParamSpec(shape=(width,), sources=((source,),), dummy=1.0)


def _linear_specs(
    name: str,
    width: int,
    sources: tuple[str, ...],
    parts: tuple[int, ...],
    bias: bool,
) -> NamedSpecs:
    """A linear map of `width` inputs, its sources one above the other, and its bias if any."""
    rows = sum(parts)
    weights = (tuple(f"{source}.weight" for source in sources),)
    yield name, ParamSpec(shape=(rows, width), sources=weights, parts=parts)
    if bias:
        biases = (tuple(f"{source}.bias" for source in sources),)
        yield f"{name}.bias", ParamSpec(shape=(rows,), sources=biases, parts=parts)
