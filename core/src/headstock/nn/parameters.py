"""The decoder's parameters: names, shapes, and the Hugging Face tensors they are made of."""

from __future__ import annotations

from functools import partial

import torch
from attrs import frozen
from torch import Tensor

from headstock.nn.conv_parameters import make_conv_specs
from headstock.nn.delta_parameters import (
    DELTA_NAMES,
    DeltaNames,
    make_delta_specs,
    take_gates,
    take_queries,
)
from headstock.nn.draft_layers import DraftNames, make_draft_specs, rename_layers
from headstock.nn.expert_parameters import (
    make_expert_specs,
    make_router_specs,
    make_stacked_expert_specs,
)
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
)


@frozen(kw_only=True)
class TensorNames:
    """What a checkpoint calls the tensors of a layer, after `model.layers.N.`.

    Names of linear maps, norms and experts are without `.weight`. Several are the parts of one
    merged map, one above the other; a single name is stored merged.

    expert: the beginning of an expert's names, with `{}` for its number
    whole_gate_up, whole_down: one tensor for all experts, where the checkpoint has it
    sinks, router_bias: the whole names
    layer_scalar, router_scale, expert_scales: the whole names
    router_bias_shape: the dimensions that it is stored with before that of the experts
    final_norm: the name of the norm after all layers, the whole of it but `.weight`
    has_stacked_experts: whether those are all there is, [experts, inputs, outputs] each, where gate
        and up take turns among the outputs of an expert
    may_swap_whole: whether those may be stored as [experts, inputs, outputs]
    left_out: beginnings of whole names of parts that are not computed, with `{}` for the number of
        layers; without layers that guess further tokens
    drafts: of these layers; None where checkpoints have none that are computed
    towers, renames: as in `ParamSpec`
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
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
    layer_scalar: str = "layer_scalar"
    router_scale: str = "router.scale"
    expert_scales: str = "router.per_expert_scale"
    dense_post_norm: str = "post_feedforward_layernorm_1"
    experts_norm: str = "pre_feedforward_layernorm_2"
    experts_post_norm: str = "post_feedforward_layernorm_2"
    conv_in: str = "conv.in_proj"
    conv: str = "conv.conv"
    conv_out: str = "conv.out_proj"
    delta: DeltaNames = DELTA_NAMES
    final_norm: str = "model.norm"
    may_swap_whole: bool = False
    has_stacked_experts: bool = False
    left_out: tuple[str, ...] = ()
    drafts: DraftNames | None = None
    towers: tuple[tuple[str, str], ...] = ()
    renames: tuple[tuple[str, str], ...] = ()


LLAMA_NAMES = TensorNames()


def parameters(config: ModelConfig, names: TensorNames = LLAMA_NAMES) -> dict[str, ParamSpec]:
    """Every parameter of the decoder, by name."""
    specs = dict(_outer_parameters(config, names))
    if config.draft_layers and names.drafts is not None:
        specs |= make_draft_specs(config, names.drafts)
    for layer in config.layers:
        specs |= _attn_norm_specs(config, layer, names)
        if layer.conv is not None:
            specs |= make_conv_specs(config, layer, layer.conv, _list_conv_names(layer, names))
        elif layer.delta is not None:
            specs |= make_delta_specs(config, layer, layer.delta, names.delta)
        else:
            specs |= _attention_parameters(config, layer, names)
        specs |= _mlp_norm_specs(config, layer, names)
        if layer.has_mlp:
            specs |= _mlp_parameters(config, layer, names)
        if layer.experts is not None:
            specs |= _moe_parameters(config, layer, layer.experts, names)
        if layer.scalar is not None:
            scalar = f"model.layers.{layer.index}.{names.layer_scalar}"
            specs[layer.scalar] = ParamSpec(shape=(1,), sources=((scalar,),), dummy=1.0)
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
            left_out=()
            if config.draft_layers
            else tuple(name.format(len(config.layers)) for name in names.left_out),
            towers=names.towers,
            renames=names.renames
            if names.drafts is None
            else (*names.renames, *rename_layers(config, names.drafts)),
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
    sizes = config.sizes_of(layer)
    width, kv_width = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    turn = row_transform(config, layer)
    gate = partial(take_queries, sizes.heads, sizes.head_dim) if layer.has_gate else None
    if layer.latent is not None:
        yield from latent_parameters(config, layer, layer.latent)
        return
    qkv = names.qkv if layer.has_own_values else (*names.qkv[:2], names.qkv[1])
    # Merged, so that keys and values lie side by side in the product and one operation stores them.
    yield from make_linear_specs(
        f"{prefix}qkv",
        config.hidden,
        tuple(f"{source}{name}" for name in qkv),
        (2 * width if layer.has_gate else width, kv_width, kv_width),
        config.qkv_bias,
        turn if gate is None else chain_transforms(gate, turn),
        rows=width + 2 * kv_width if layer.has_gate else None,
    )
    if layer.has_gate:
        yield from make_linear_specs(
            f"{prefix}attn_gate",
            config.hidden,
            (f"{source}{names.qkv[0]}",),
            (2 * width,),
            config.qkv_bias,
            partial(take_gates, sizes.heads, sizes.head_dim),
            rows=width,
        )
    yield from make_linear_specs(
        f"{prefix}attn_out",
        width,
        (f"{source}{names.out}",),
        (config.hidden,),
        config.out_bias,
        bias_transform=first_shard_transform(config),
    )
    if layer.sinks is not None:
        yield (
            layer.sinks,
            ParamSpec(
                shape=(sizes.heads,), sources=((f"{source}{names.sinks}",),), dtype="float32"
            ),
        )
    if config.value_norm:
        yield (
            f"{prefix}v_norm",
            ParamSpec(
                shape=(sizes.kv_heads, sizes.head_dim),
                roles=frozenset((Role.HEAD_NORM,)),
                dtype=norm_dtype(config),
                compute=partial(_make_ones, sizes.kv_heads, sizes.head_dim),
            ),
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
                shape=(sizes.heads + sizes.kv_heads, sizes.head_dim),
                roles=frozenset((Role.HEAD_NORM,)),
                sources=(q,) * sizes.heads + (k,) * sizes.kv_heads,
                stacked=True,
                dummy=0.0 if config.norm_offset else 1.0,
                dtype=norm_dtype(config),
                transform=chain_transforms(norm_transform(config), head_transform(config, layer)),
            ),
        )


def _make_ones(heads: int, head_dim: int, config: ModelConfig, max_seq_len: int) -> Tensor:
    """The weight of a norm without one.   returns: [heads, head_dim]"""
    return torch.ones(heads, head_dim)


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


def _list_conv_names(layer: LayerConfig, names: TensorNames) -> tuple[str, str, str]:
    """What the checkpoint calls the maps and the weights of a layer's convolution."""
    source = f"model.layers.{layer.index}."
    return f"{source}{names.conv_in}", f"{source}{names.conv}", f"{source}{names.conv_out}"


def _mlp_parameters(config: ModelConfig, layer: LayerConfig, names: TensorNames) -> NamedSpecs:
    """Parameters of a dense feed-forward part: gate and up merged in this order."""
    source, prefix = f"model.layers.{layer.index}.", layer.prefix
    inner = config.sizes_of(layer).intermediate
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
    source, prefix = f"model.layers.{layer.index}.", layer.prefix
    if experts.beside_mlp:
        yield from _beside_mlp_norm_specs(config, layer, names)
    yield from make_router_specs(config, layer, experts, f"{source}{names.router}")
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
    if experts.has_scales:
        scales = ((f"{source}{names.expert_scales}",),)
        yield f"{prefix}expert_scales", ParamSpec(shape=(experts.count,), sources=scales, dummy=1.0)
    wholes = (f"{source}{names.whole_gate_up}", f"{source}{names.whole_down}")
    if names.has_stacked_experts:
        yield from make_stacked_expert_specs(config, layer, experts, wholes)
    else:
        each = [f"{source}{names.expert.format(expert)}" for expert in experts.own]
        yield from make_expert_specs(
            config,
            layer,
            experts,
            wholes,
            tuple(tuple(f"{name}{part}" for part in names.expert_gate_up) for name in each),
            tuple((f"{name}{names.expert_down}",) for name in each),
            may_swap_whole=names.may_swap_whole,
        )
    if experts.shared:
        yield from _shared_expert_parameters(config, layer, experts, names)


def _beside_mlp_norm_specs(
    config: ModelConfig, layer: LayerConfig, names: TensorNames
) -> NamedSpecs:
    """The norms of experts beside a dense feed-forward part, and of what that gives."""
    source, prefix = f"model.layers.{layer.index}.", layer.prefix
    for name, stored in (
        ("dense_post_norm", names.dense_post_norm),
        ("experts_norm", names.experts_norm),
        ("experts_post_norm", names.experts_post_norm),
    ):
        yield f"{prefix}{name}", make_norm_spec(config, config.hidden, f"{source}{stored}")
    # What is normalized is multiplied by the scale, and by this: one norm.
    yield (
        f"{prefix}router_norm",
        ParamSpec(
            shape=(config.hidden,),
            roles=frozenset((Role.NORM,)),
            sources=((f"{source}{names.router_scale}",),),
            dummy=config.hidden**-0.5,
            dtype=norm_dtype(config),
            transform=partial(_multiply, config.hidden**-0.5),
        ),
    )


def _multiply(factor: float, weight: Tensor) -> Tensor:
    return weight.mul_(factor)


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
        yield from make_linear_specs(
            f"{prefix}shared_gate", config.hidden, gate, (1,), False, role=Role.ROUTER
        )


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
