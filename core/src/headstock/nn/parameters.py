"""The decoder's parameters: names, shapes, and the Hugging Face tensors they are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from attrs import frozen
from torch import Tensor

from headstock.nn.rope import rope_table
from headstock.spi import Experts, LayerConfig, ModelConfig, ParamSpec, QkNorm, Role, Rope

_NamedSpecs = Iterator[tuple[str, ParamSpec]]

_Transform = Callable[[Tensor], Tensor]


@frozen(kw_only=True)
class TensorNames:
    """What a checkpoint calls the tensors of a layer, after `model.layers.N.`.

    Names of linear maps, norms and experts are without `.weight`. Several are the parts of one
    merged map, one above the other; a single name is stored merged.

    expert: the beginning of an expert's names, with `{}` for its number
    whole_gate_up, whole_down: one tensor for all experts, where the checkpoint has it
    router_bias: the whole name
    router_bias_shape: the dimensions that it is stored with before that of the experts
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


LLAMA_NAMES = TensorNames()


def parameters(config: ModelConfig, names: TensorNames = LLAMA_NAMES) -> dict[str, ParamSpec]:
    """Every parameter of the decoder, by name."""
    specs = dict(_outer_parameters(config))
    for layer in config.layers:
        specs |= _attention_parameters(config, layer, names)
        specs |= (
            _mlp_parameters(config, layer, names)
            if layer.experts is None
            else _moe_parameters(config, layer, layer.experts, names)
        )
    return specs


def _outer_parameters(config: ModelConfig) -> _NamedSpecs:
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
    yield "norm", _norm_spec(config, config.hidden, "model.norm")
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
) -> _NamedSpecs:
    """Parameters of a layer's attention: q, k and v merged in this order."""
    source, prefix = f"model.layers.{layer.index}.", layer.prefix
    width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    turn = _transform_rows(config, layer)
    if config.pre_norm:
        yield f"{prefix}attn_norm", _norm_spec(config, config.hidden, f"{source}{names.attn_norm}")
    # Merged, so that keys and values lie side by side in the product and one operation stores them.
    yield from _linear_specs(
        f"{prefix}qkv",
        config.hidden,
        tuple(f"{source}{name}" for name in names.qkv),
        (width, kv_width, kv_width),
        config.qkv_bias,
        turn,
    )
    yield from _linear_specs(
        f"{prefix}attn_out",
        width,
        (f"{source}{names.out}",),
        (config.hidden,),
        config.out_bias,
        bias_transform=_once(config),
    )
    if config.post_norm:
        yield (
            f"{prefix}attn_post_norm",
            _norm_spec(config, config.hidden, f"{source}{names.attn_post_norm}"),
        )
    if config.qk_norm is QkNorm.WHOLE:
        yield f"{prefix}q_norm", _norm_spec(config, width, f"{source}{names.q_norm}", turn)
        yield f"{prefix}k_norm", _norm_spec(config, kv_width, f"{source}{names.k_norm}", turn)
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
                dtype=_norm_dtype(config),
                transform=_chain(_norm_transform(config), turn),
            ),
        )


def _mlp_parameters(config: ModelConfig, layer: LayerConfig, names: TensorNames) -> _NamedSpecs:
    """Parameters of a dense feed-forward part: gate and up merged in this order."""
    source, prefix, inner = f"model.layers.{layer.index}.", layer.prefix, config.intermediate
    yield from _mlp_norm_specs(config, layer, names)
    yield from _linear_specs(
        f"{prefix}gate_up",
        config.hidden,
        tuple(f"{source}{name}" for name in names.gate_up),
        (inner, inner),
        config.mlp_bias,
    )
    yield from _linear_specs(
        f"{prefix}down",
        inner,
        (f"{source}{names.down}",),
        (config.hidden,),
        config.mlp_bias,
        bias_transform=_once(config),
    )


def _moe_parameters(
    config: ModelConfig, layer: LayerConfig, experts: Experts, names: TensorNames
) -> _NamedSpecs:
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
) -> _NamedSpecs:
    """Parameters of the expert that every token uses."""
    source, prefix, inner = f"model.layers.{layer.index}.", layer.prefix, experts.shared
    yield from _linear_specs(
        f"{prefix}shared_gate_up",
        config.hidden,
        tuple(f"{source}{name}" for name in names.shared_gate_up),
        (inner, inner),
        config.mlp_bias,
    )
    down = (f"{source}{names.shared_down}",)
    yield from _linear_specs(
        f"{prefix}shared_down",
        inner,
        down,
        (config.hidden,),
        config.mlp_bias,
        bias_transform=_once(config),
    )
    if experts.shared_gate:
        gate = (f"{source}{names.shared_gate}",)
        yield from _linear_specs(f"{prefix}shared_gate", config.hidden, gate, (1,), False)


def _mlp_norm_specs(config: ModelConfig, layer: LayerConfig, names: TensorNames) -> _NamedSpecs:
    """The norms before and after a layer's feed-forward part."""
    source, prefix = f"model.layers.{layer.index}.", layer.prefix
    if config.pre_norm:
        yield f"{prefix}mlp_norm", _norm_spec(config, config.hidden, f"{source}{names.mlp_norm}")
    if config.post_norm:
        yield (
            f"{prefix}mlp_post_norm",
            _norm_spec(config, config.hidden, f"{source}{names.mlp_post_norm}"),
        )


def _norm_spec(
    config: ModelConfig, width: int, source: str, turn: _Transform | None = None
) -> ParamSpec:
    """A norm's weight."""
    return ParamSpec(
        shape=(width,),
        roles=frozenset((Role.NORM,)),
        sources=((f"{source}.weight",),),
        dummy=0.0 if config.norm_offset else 1.0,
        dtype=_norm_dtype(config),
        transform=_chain(_norm_transform(config), turn),
    )


def _norm_dtype(config: ModelConfig) -> str | None:
    """The type of norms' weights: 1 + w in 16 bits would lose most of w."""
    return "float32" if config.wide_norms or config.norm_offset else None


def _norm_transform(config: ModelConfig) -> _Transform | None:
    """What makes a norm's weight out of the stored one."""
    return _add_one if config.norm_offset else None


def _add_one(weight: Tensor) -> Tensor:
    return weight.add_(1)


def _transform_rows(config: ModelConfig, layer: LayerConfig) -> _Transform | None:
    """What brings rows that are turned in neighbouring pairs into halves; None if they are."""
    rope = None if layer.rope is None else config.ropes[layer.rope]
    return (
        None
        if rope is None or not rope.interleaved
        else partial(_pairs_to_halves, rope.dim, config.head_dim, config.heads + config.kv_heads)
    )


# Once, at load: which number of a query stands where changes no product with a key, as long as
# both are reordered alike.
def _pairs_to_halves(dim: int, head_dim: int, heads: int, rows: Tensor) -> Tensor:
    """The rows of the first heads with neighbouring pairs brought into halves.

    rows: [n, ...] or [heads, head_dim]    writes: rows
    """
    pairs = rows.view(-1, head_dim, *rows.shape[1:]) if rows.shape[1:] != (head_dim,) else rows
    turned = pairs[:heads, :dim]
    turned.copy_(torch.cat((turned[:, 0::2], turned[:, 1::2]), 1))
    return rows


def _chain(*transforms: _Transform | None) -> _Transform | None:
    """The transforms one after the other; None where there are none."""
    found = [transform for transform in transforms if transform is not None]
    if not found:
        return None

    def apply(tensor: Tensor) -> Tensor:
        for transform in found:
            tensor = transform(tensor)
        return tensor

    return apply


def _once(config: ModelConfig) -> _Transform | None:
    """What makes a bias that is added before a sum over shards: the first shard has it alone."""
    return torch.zero_ if config.shard.index else None


def _linear_specs(
    name: str,
    width: int,
    sources: tuple[str, ...],
    parts: tuple[int, ...],
    bias: bool,
    transform: _Transform | None = None,
    bias_transform: _Transform | None = None,
) -> _NamedSpecs:
    """A linear map of `width` inputs, its sources one above the other, and its bias if any.

    bias_transform: that of the bias; None for the weight's
    """
    rows = sum(parts)
    weights = (tuple(f"{source}.weight" for source in sources),)
    roles = frozenset((Role.LINEAR,))
    yield (
        name,
        ParamSpec(
            shape=(rows, width), roles=roles, sources=weights, parts=parts, transform=transform
        ),
    )
    if bias:
        biases = (tuple(f"{source}.bias" for source in sources),)
        yield (
            f"{name}.bias",
            ParamSpec(
                shape=(rows,),
                roles=roles,
                sources=biases,
                parts=parts,
                transform=bias_transform or transform,
            ),
        )
