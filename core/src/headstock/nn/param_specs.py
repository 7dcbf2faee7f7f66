"""Declarations of single parameters, of which those of a decoder are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from headstock.spi import LayerConfig, ModelConfig, ParamSpec, Role

NamedSpecs = Iterator[tuple[str, ParamSpec]]

Transform = Callable[[Tensor], Tensor]


def make_norm_spec(
    config: ModelConfig, width: int, source: str, turn: Transform | None = None
) -> ParamSpec:
    """A norm's weight."""
    return ParamSpec(
        shape=(width,),
        roles=frozenset((Role.NORM,)),
        sources=((f"{source}.weight",),),
        dummy=0.0 if config.norm_offset else 1.0,
        dtype=norm_dtype(config),
        transform=chain_transforms(norm_transform(config), turn),
    )


def norm_dtype(config: ModelConfig) -> str | None:
    """The type of norms' weights: 1 + w in 16 bits would lose most of w."""
    return "float32" if config.wide_norms or config.norm_offset else None


def norm_transform(config: ModelConfig) -> Transform | None:
    """What makes a norm's weight out of the stored one."""
    return _add_one if config.norm_offset else None


def _add_one(weight: Tensor) -> Tensor:
    return weight.add_(1)


def row_transform(config: ModelConfig, layer: LayerConfig) -> Transform | None:
    """What brings rows that are turned in neighbouring pairs into halves; None if they are."""
    rope = None if layer.rope is None else config.ropes[layer.rope]
    if rope is None or not rope.interleaved:
        return None
    sizes = config.sizes_of(layer)
    return partial(_pairs_to_halves, rope.dim, sizes.head_dim, sizes.heads + sizes.kv_heads)


# Once, at load: which number of a query stands where changes no product with a key, as long as
# both are reordered alike.
def _pairs_to_halves(dim: int, head_dim: int, heads: int, rows: Tensor) -> Tensor:
    """The rows of the first heads with neighbouring pairs brought into halves.

    rows: [heads * head_dim, ...]    writes: rows
    """
    pairs = rows.view(-1, head_dim, *rows.shape[1:])
    turned = pairs[:heads, :dim]
    turned.copy_(torch.cat((turned[:, 0::2], turned[:, 1::2]), 1))
    return rows


def head_transform(config: ModelConfig, layer: LayerConfig) -> Transform | None:
    """`row_transform` for weights with a row a head, [heads, head_dim]."""
    turn = row_transform(config, layer)
    return None if turn is None else lambda rows: turn(rows.view(-1)).view(rows.shape)


def chain_transforms(*transforms: Transform | None) -> Transform | None:
    """The transforms one after the other; None where there are none."""
    found = [transform for transform in transforms if transform is not None]
    if not found:
        return None

    def apply(tensor: Tensor) -> Tensor:
        for transform in found:
            tensor = transform(tensor)
        return tensor

    return apply


def first_shard_transform(config: ModelConfig) -> Transform | None:
    """What makes a bias that is added before a sum over shards: the first shard has it alone."""
    return torch.zero_ if config.shard.index else None


def make_linear_specs(
    name: str,
    width: int,
    sources: tuple[str, ...],
    parts: tuple[int, ...],
    bias: bool,
    transform: Transform | None = None,
    bias_transform: Transform | None = None,
    role: Role = Role.LINEAR,
    rows: int | None = None,
) -> NamedSpecs:
    """A linear map of `width` inputs, its sources one above the other, and its bias if any.

    parts: how many rows each source has
    rows: how many the transform leaves; None for all
    bias_transform: that of the bias; None for the weight's
    """
    count = sum(parts)
    kept = count if rows is None else rows
    weights = (tuple(f"{source}.weight" for source in sources),)
    roles = frozenset((role,))
    yield (
        name,
        ParamSpec(
            shape=(kept, width),
            roles=roles,
            sources=weights,
            parts=parts,
            transform=transform,
            source_shape=None if rows is None else (count, width),
        ),
    )
    if bias:
        biases = (tuple(f"{source}.bias" for source in sources),)
        yield (
            f"{name}.bias",
            ParamSpec(
                shape=(kept,),
                roles=roles,
                sources=biases,
                parts=parts,
                transform=bias_transform or transform,
                source_shape=None if rows is None else (count,),
            ),
        )
