"""A decoder described as data: its shapes, its layers and how they share KV."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from headstock.spi.attention import Feature
from headstock.spi.kv import KVGroup


@frozen(kw_only=True)
class Rope:
    """Rotary positions.

    theta: the base of the frequencies
    dim: how many elements of a head are rotated
    scaling: its name in config.json; `parameters` are its own numbers there
    """

    theta: float
    dim: int
    scaling: str = "default"
    parameters: Mapping[str, Any] = field(factory=dict, hash=False)


@frozen(kw_only=True)
class Experts:
    """A mixture of experts.

    count: experts of a layer
    per_token: experts of a token
    intermediate: the width of an expert
    renormalize: whether a token's weights are divided by their sum
    """

    count: int
    per_token: int
    intermediate: int
    renormalize: bool


@frozen(kw_only=True)
class LayerConfig:
    """One decoder layer.

    prefix: begins the names of its parameters
    group: its KV group
    scale, window, softcap: as in `LayerInfo`
    experts: None for a dense layer
    """

    index: int
    prefix: str
    group: int
    scale: float
    window: int | None = None
    softcap: float = 0.0
    experts: Experts | None = None


@frozen(kw_only=True)
class ModelConfig:
    """A decoder as data: shapes, differences between layers, and KV groups. Sizes are in elements.

    ignored_fields: fields of config.json that may matter to its author and that the family does not
        read
    """

    architecture: str
    vocab: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    max_position: int
    rope: Rope
    layers: tuple[LayerConfig, ...]
    kv_groups: tuple[KVGroup, ...]
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    activation: str = "silu"
    dtype: str = "float32"
    eos_ids: tuple[int, ...] = ()
    features: frozenset[Feature] = frozenset()
    ignored_fields: tuple[str, ...] = ()
