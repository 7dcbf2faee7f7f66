"""The decoder's parameters: names, shapes, and the Hugging Face tensors they are made of."""

from __future__ import annotations

from functools import partial

import torch
from attrs import frozen
from torch import Tensor

from headstock.nn.latent_parameters import latent_parameters
from headstock.nn.param_specs import (
    NamedSpecs,
    chain_transforms,
    first_shard_transform,
    head_transform,
    make_linear_specs,
    make_norm_spec,
    norm_dtype,
    norm_transform,
    row_transform,
)
from headstock.nn.rope import rope_table
from headstock.spi import (
    Experts,
    LayerConfig,
    ModelConfig,
    ParamSpec,
    QkNorm,
    Role,
    Rope,
    ShortConv,
)


@frozen(kw_only=True)
class TensorNames:
    """What a checkpoint calls the tensors of a layer, after `model.layers.N.`.

    Names of linear maps, norms and experts are without `.weight`. Several are the parts of one
    merged map, one above the other; a single name is stored merged.

    expert: the beginning of an expert's names, with `{}` for its number
    whole_gate_up, whole_down: one tensor for all experts, where the checkpoint has it
    router_bias: the whole name
    router_bias_shape: the dimensions that it is stored with before that of the experts
    final_norm: the name of the norm after all layers, the whole of it but `.weight`
    left_out: beginnings of whole names of parts that are not computed, with `{}` for the number of
        layers
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    attn_norm: str = "input_layernorm"
    attn_post_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = "post_feedforward_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    router_bias: str = "mlp.moe_statics.e_score_correction_bias"
    router_bias_shape: tuple[int, ...] = (1,)
    expert: str = "mlp.experts.{}."
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    whole_gate_up: str = "mlp.experts.gate_up_proj"
    whole_down: str = "mlp.experts.down_proj"
    shared_gate_up: tuple[str, ...] = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
    shared_down: str = "mlp.shared_expert.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    conv_in: str = "conv.in_proj"
    conv: str = "conv.conv"
    conv_out: str = "conv.out_proj"
    final_norm: str = "model.norm"
    left_out: tuple[str, ...] = ()


LLAMA_NAMES = TensorNames()


def parameters(config: ModelConfig, names: TensorNames = LLAMA_NAMES) -> dict[str, ParamSpec]:
    """Every parameter of the decoder, by name."""
    specs = dict(_outer_parameters(config, names))
    for layer in config.layers:
        specs |= (
            _attention_parameters(config, layer, names)
            if layer.conv is None
            else _conv_parameters(config, layer, layer.conv, names)
        )
        specs |= (
            _mlp_parameters(config, layer, names)
            if layer.experts is None
            else _moe_parameters(config, layer, layer.experts, names)
        )
    return specs


def _outer_parameters(config: ModelConfig, names: TensorNames) -> NamedSpecs:
    """Parameters outside layers."""
    # Checkpoints with tied embeddings often hold the same matrix twice; older ones the rope
    # frequencies too.
    twin = ("lm_head.weight",) if config.tied_embeddings else ()
    yield (
        "embed",
        ParamSpec(
            shape=(config.vocab, config.hidden),
            roles=frozenset((Role.EMBEDDING, Role.HEAD)[: 1 + config.tied_embeddings]),
            sources=(("model.embed_tokens.weight",),),
            copies=twin,
            left_out=tuple(name.format(len(config.layers)) for name in names.left_out),
        ),
    )
    if not config.tied_embeddings:
        yield (
            "lm_head",
            ParamSpec(
                shape=(config.vocab, config.hidden),
                roles=frozenset((Role.HEAD,)),
                sources=(("lm_head.weight",),),
            ),
        )
    yield "norm", make_norm_spec(config, config.hidden, names.final_norm)
    for index, rope in enumerate(config.ropes):
        yield (
            f"rope.{index}",
            ParamSpec(
                shape=(config.max_position, 2, rope.dim // 2),
                roles=frozenset((Role.ROPE,)),
                dtype="float32",
                compute=partial(_compute_rope, rope),
                ignored=tuple(
                    f"model.layers.{layer.index}.self_attn.rotary_emb.inv_freq"
                    for layer in config.layers
                ),
            ),
        )


def _compute_rope(rope: Rope, config: ModelConfig, max_seq_len: int) -> Tensor:
    """The rope table for `max_seq_len` positions.   returns: [max_seq_len, 2, dim / 2] float32"""
    return rope_table(rope, max_seq_len, config.max_position)


def _attention_parameters(
    config: ModelConfig, layer: LayerConfig, names: TensorNames
) -> NamedSpecs:
    """Parameters of a layer's attention: q, k and v merged in this order."""
    source, prefix = f"model.layers.{layer.index}.", layer.prefix
    width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    turn = row_transform(config, layer)
    yield from _attn_norm_specs(config, layer, names)
    if layer.latent is not None:
        yield from latent_parameters(config, layer, layer.latent)
        return
    # Merged, so that keys and values lie side by side in the product and one operation stores them.
    yield from make_linear_specs(
        f"{prefix}qkv",
        config.hidden,
        tuple(f"{source}{name}" for name in names.qkv),
        (width, kv_width, kv_width),
        config.qkv_bias,
        turn,
    )
    yield from make_linear_specs(
        f"{prefix}attn_out",
        width,
        (f"{source}{names.out}",),
        (config.hidden,),
        config.out_bias,
        bias_transform=first_shard_transform(config),
    )
    if config.qk_norm is QkNorm.WHOLE:
        yield f"{prefix}q_norm", make_norm_spec(config, width, f"{source}{names.q_norm}", turn)
        yield f"{prefix}k_norm", make_norm_spec(config, kv_width, f"{source}{names.k_norm}", turn)
    if config.qk_norm is QkNorm.HEAD:
        # One row a head, so that queries and keys are normalized together.
        q, k = ((f"{source}{name}.weight",) for name in (names.q_norm, names.k_norm))
        yield (
            f"{prefix}qk_norm",
            ParamSpec(
                shape=(config.heads + config.kv_heads, config.head_dim),
                roles=frozenset((Role.HEAD_NORM,)),
                sources=(q,) * config.heads + (k,) * config.kv_heads,
                stacked=True,
                dummy=0.0 if config.norm_offset else 1.0,
                dtype=norm_dtype(config),
                transform=chain_transforms(norm_transform(config), head_transform(config, layer)),
            ),
        )


def _attn_norm_specs(config: ModelConfig, layer: LayerConfig, names: TensorNames) -> NamedSpecs:
    """The norms before and after a layer's attention, or what it has instead of that."""
    source, prefix = f"model.layers.{layer.index}.", layer.prefix
    if config.pre_norm:
        yield (
            f"{prefix}attn_norm",
            make_norm_spec(config, config.hidden, f"{source}{names.attn_norm}"),
        )
    if config.post_norm:
        yield (
            f"{prefix}attn_post_norm",
            make_norm_spec(config, config.hidden, f"{source}{names.attn_post_norm}"),
        )


def _conv_parameters(
    config: ModelConfig, layer: LayerConfig, conv: ShortConv, names: TensorNames
) -> NamedSpecs:
    """Parameters of a gated convolution: the gate before, the one after and its input merged."""
    source, prefix, width = f"model.layers.{layer.index}.", layer.prefix, conv.width
    yield from _attn_norm_specs(config, layer, names)
    yield from make_linear_specs(
        f"{prefix}conv_in",
        config.hidden,
        (f"{source}{names.conv_in}",),
        (width,) * 3,
        conv.bias,
    )
    yield (
        f"{prefix}conv",
        ParamSpec(
            shape=(conv.taps, width),
            sources=((f"{source}{names.conv}.weight",),),
            source_shape=(width, 1, conv.taps),
            transform=_by_tap,
        ),
    )
    if conv.bias:
        yield (
            f"{prefix}conv.bias",
            ParamSpec(shape=(width,), sources=((f"{source}{names.conv}.bias",),)),
        )
    yield from make_linear_specs(
        f"{prefix}conv_out",
        width,
        (f"{source}{names.conv_out}",),
        (config.hidden,),
        conv.bias,
        bias_transform=first_shard_transform(config),
    )


def _by_tap(weight: Tensor) -> Tensor:
    """A convolution's weight with a row for each tap.   weight: [width, 1, taps]"""
    return weight[:, 0].t().contiguous()


def _mlp_parameters(config: ModelConfig, layer: LayerConfig, names: TensorNames) -> NamedSpecs:
    """Parameters of a dense feed-forward part: gate and up merged in this order."""
    source, prefix, inner = f"model.layers.{layer.index}.", layer.prefix, config.intermediate
    yield from _mlp_norm_specs(config, layer, names)
    yield from make_linear_specs(
        f"{prefix}gate_up",
        config.hidden,
        tuple(f"{source}{name}" for name in names.gate_up),
        (inner, inner),
        config.mlp_bias,
    )
    yield from make_linear_specs(
        f"{prefix}down",
        inner,
        (f"{source}{names.down}",),
        (config.hidden,),
        config.mlp_bias,
        bias_transform=first_shard_transform(config),
    )


def _moe_parameters(
    config: ModelConfig, layer: LayerConfig, experts: Experts, names: TensorNames
) -> NamedSpecs:
    """Parameters of a mixture of experts, from one tensor an expert or from one for all."""
    source, prefix, inner = f"model.layers.{layer.index}.", layer.prefix, experts.intermediate
    each = [f"{source}{names.expert.format(expert)}" for expert in range(experts.count)]
    yield from _mlp_norm_specs(config, layer, names)
    yield (
        f"{prefix}router",
        ParamSpec(
            shape=(experts.count, config.hidden),
            roles=frozenset((Role.LINEAR,)),
            sources=((f"{source}{names.router}.weight",),),
            dtype="float32" if experts.wide_scores else None,
        ),
    )
    if experts.choice_bias:
        yield (
            f"{prefix}router_bias",
            ParamSpec(
                shape=(experts.count,),
                sources=((f"{source}{names.router_bias}",),),
                dtype="float32",
                source_shape=(*names.router_bias_shape, experts.count),
                transform=torch.flatten,
            ),
        )
    yield (
        f"{prefix}experts_gate_up",
        ParamSpec(
            shape=(experts.count, 2 * inner, config.hidden),
            roles=frozenset((Role.EXPERTS,)),
            sources=tuple(
                tuple(f"{name}{part}.weight" for part in names.expert_gate_up) for name in each
            ),
            stacked=True,
            parts=(inner, inner),
            whole=f"{source}{names.whole_gate_up}",
        ),
    )
    yield (
        f"{prefix}experts_down",
        ParamSpec(
            shape=(experts.count, config.hidden, inner),
            roles=frozenset((Role.EXPERTS,)),
            sources=tuple((f"{name}{names.expert_down}.weight",) for name in each),
            stacked=True,
            whole=f"{source}{names.whole_down}",
        ),
    )
    if experts.shared:
        yield from _shared_expert_parameters(config, layer, experts, names)


def _shared_expert_parameters(
    config: ModelConfig, layer: LayerConfig, experts: Experts, names: TensorNames
) -> NamedSpecs:
    """Parameters of the expert that every token uses."""
    source, prefix, inner = f"model.layers.{layer.index}.", layer.prefix, experts.shared
    yield from make_linear_specs(
        f"{prefix}shared_gate_up",
        config.hidden,
        tuple(f"{source}{name}" for name in names.shared_gate_up),
        (inner, inner),
        config.mlp_bias,
    )
    down = (f"{source}{names.shared_down}",)
    yield from make_linear_specs(
        f"{prefix}shared_down",
        inner,
        down,
        (config.hidden,),
        config.mlp_bias,
        bias_transform=first_shard_transform(config),
    )
    if experts.shared_gate:
        gate = (f"{source}{names.shared_gate}",)
        yield from make_linear_specs(f"{prefix}shared_gate", config.hidden, gate, (1,), False)


def _mlp_norm_specs(config: ModelConfig, layer: LayerConfig, names: TensorNames) -> NamedSpecs:
    """The norms before and after a layer's feed-forward part."""
    source, prefix = f"model.layers.{layer.index}.", layer.prefix
    if config.pre_norm:
        yield (
            f"{prefix}mlp_norm",
            make_norm_spec(config, config.hidden, f"{source}{names.mlp_norm}"),
        )
    if config.post_norm:
        yield (
            f"{prefix}mlp_post_norm",
            make_norm_spec(config, config.hidden, f"{source}{names.mlp_post_norm}"),
        )
