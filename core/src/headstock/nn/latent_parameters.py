"""The parameters of attention over latent vectors, and the tensors that they are made of."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from headstock.nn.param_specs import (
    NamedSpecs,
    Transform,
    first_shard_transform,
    make_linear_specs,
    make_norm_spec,
)
from headstock.spi import LatentAttention, LayerConfig, ModelConfig, ParamSpec, Role


def latent_parameters(
    config: ModelConfig, layer: LayerConfig, latent: LatentAttention
) -> NamedSpecs:
    """Parameters of a layer's attention: what makes latent vectors and queries, and the output.

    latent: [(q_rank +) kv_rank + rope_dim, hidden]
    q_latent_norm, kv_latent_norm: [q_rank], [kv_rank]
    q_up: [heads * (nope_dim + rope_dim), q_rank, or hidden]
    k_up, v_up: [heads, kv_rank, nope_dim], [heads, v_dim, kv_rank]
    """
    source, prefix = f"model.layers.{layer.index}.self_attn.", layer.prefix
    rank, head_dim = latent.kv_rank, latent.nope_dim + latent.rope_dim
    heads = config.sizes_of(layer).heads
    stored = rank + latent.rope_dim
    compressed = () if latent.q_rank is None else (latent.q_rank,)
    # One product: both read the same tokens.
    downs = (*(("q_a_proj",) if compressed else ()), "kv_a_proj_with_mqa")
    yield from make_linear_specs(
        f"{prefix}latent",
        config.hidden,
        tuple(f"{source}{name}" for name in downs),
        (*compressed, stored),
        config.qkv_bias,
        _turn_last(config, layer, latent.rope_dim, None),
    )
    if compressed:
        norm = make_norm_spec(config, *compressed, f"{source}q_a_layernorm")
        yield f"{prefix}q_latent_norm", norm
    yield f"{prefix}kv_latent_norm", make_norm_spec(config, rank, f"{source}kv_a_layernorm")
    yield from make_linear_specs(
        f"{prefix}q_up",
        latent.q_rank or config.hidden,
        (f"{source}{'q_b_proj' if compressed else 'q_proj'}",),
        (heads * head_dim,),
        False,
        _turn_last(config, layer, latent.rope_dim, head_dim),
    )
    # Both halves of one tensor, which is read twice: beside it a load has room for one parameter.
    halves = {
        "k_up": ((heads, rank, latent.nope_dim), _cut_keys),
        "v_up": ((heads, latent.v_dim, rank), _cut_values),
    }
    for name, (shape, cut) in halves.items():
        yield (
            f"{prefix}{name}",
            ParamSpec(
                shape=shape,
                roles=frozenset((Role.HEAD_LINEAR,)),
                sources=((f"{source}kv_b_proj.weight",),),
                source_shape=(heads * (latent.nope_dim + latent.v_dim), rank),
                transform=partial(cut, heads, latent.nope_dim),
            ),
        )
    yield from make_linear_specs(
        f"{prefix}attn_out",
        heads * latent.v_dim,
        (f"{source}o_proj",),
        (config.hidden,),
        config.out_bias,
        bias_transform=first_shard_transform(config),
    )


def _cut_keys(heads: int, nope_dim: int, rows: Tensor) -> Tensor:
    """What makes the keys of each head, as a map of queries.

    rows: [heads * (nope_dim + v_dim), kv_rank]    returns: [heads, kv_rank, nope_dim]
    """
    return rows.view(heads, -1, rows.shape[-1])[:, :nope_dim].mT.contiguous()


def _cut_values(heads: int, nope_dim: int, rows: Tensor) -> Tensor:
    """What makes the values of each head.

    rows: [heads * (nope_dim + v_dim), kv_rank]    returns: [heads, v_dim, kv_rank]
    """
    return rows.view(heads, -1, rows.shape[-1])[:, nope_dim:].contiguous()


def _turn_last(
    config: ModelConfig, layer: LayerConfig, dim: int, head_dim: int | None
) -> Transform | None:
    """What brings the last rows of each head from neighbouring pairs into halves.

    head_dim: of the rows of a head; None for one head
    returns: None where they are in halves
    """
    assert layer.rope is not None, "the rope of the part that is turned"
    if not config.ropes[layer.rope].interleaved:
        return None
    return partial(_pairs_to_halves, dim, head_dim)


def _pairs_to_halves(dim: int, head_dim: int | None, rows: Tensor) -> Tensor:
    """The last `dim` rows of each head with neighbouring pairs brought into halves.

    rows: [n, ...]    writes: rows
    """
    heads = rows.view(-1, head_dim or len(rows), *rows.shape[1:])
    turned = heads[:, -dim:]
    turned.copy_(torch.cat((turned[:, 0::2], turned[:, 1::2]), 1))
    return rows
