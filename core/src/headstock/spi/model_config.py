"""A decoder described as data: its shapes, its layers and how they share KV."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from attrs import field, frozen
from attrs.validators import instance_of

from headstock.spi.attention import Feature
from headstock.spi.kv import KVGroup, LatentKV, StateKV, StateTensor


class Activation(Enum):
    """What the gate of a feed-forward part goes through. GELU_TANH is gelu by its approximation."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"


class QkNorm(Enum):
    """Which norm queries and keys have before they are turned.

    HEAD: each head by itself
    WHOLE: all heads of queries together, and all of keys
    """

    NONE = "none"
    HEAD = "head"
    WHOLE = "whole"


@frozen(kw_only=True)
class Rope:
    """Rotary positions.

    theta: the base of the frequencies
    dim: how many elements of a head, its first, are rotated
    scaling: its name in config.json; `parameters` are its own numbers there
    interleaved: whether the checkpoint's rows pair neighbours; loading brings them into halves
    """

    theta: float
    dim: int
    scaling: str = "default"
    parameters: Mapping[str, Any] = field(factory=dict, hash=False)
    interleaved: bool = False


class Scoring(Enum):
    """How router scores become probabilities. SIGMOID: each expert's independently."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@frozen(kw_only=True)
class Experts:
    """A mixture of experts, of which a token uses the most probable ones.

    count: experts of a layer
    per_token: experts of a token
    intermediate: the width of an expert
    renormalize: whether a token's weights are divided by their sum
    norm_floor: the least that they are divided by
    choice_bias: whether a bias is added where experts are chosen, not where they are weighed
    shared: the width of the expert that every token uses; 0 for none
    shared_gate: whether what it gives is multiplied by the sigmoid of a map of the token
    wide_scores: whether scores are computed in float32
    groups: equal parts of the experts; a token uses those of `groups_per_token` parts alone
    group_best: how many of a group's best experts are summed to choose groups
    scale: weights are multiplied by it
    """

    count: int
    per_token: int
    intermediate: int
    renormalize: bool
    norm_floor: float = 0.0
    choice_bias: bool = False
    shared: int = 0
    shared_gate: bool = False
    scoring: Scoring = field(default=Scoring.SOFTMAX, validator=instance_of(Scoring))
    wide_scores: bool = False
    groups: int = 1
    groups_per_token: int = 1
    group_best: int = 1
    scale: float = 1.0


@frozen(kw_only=True)
class LatentAttention:
    """Attention over one vector for each token (DeepSeek-V2, arXiv 2405.04434).

    The vector holds what keys and values of all heads are made of, and one key that is turned. What
    would make the keys is multiplied into the queries, and what makes the values into the results,
    so neither is ever written out.

    q_rank: the width that the stream is brought to before queries are made; None for the stream
    kv_rank: the width of what keys and values are made of
    nope_dim, rope_dim: elements of a head of queries that are not turned, and that are
    v_dim: elements of a head of values
    norm_eps: of the norms of both compressed widths
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    norm_eps: float

    @property
    def layout(self) -> LatentKV:
        """What its layer keeps of a token."""
        return LatentKV(dim=self.kv_rank + self.rope_dim, rope_dim=self.rope_dim)


@frozen(kw_only=True)
class ShortConv:
    """A gated convolution over the latest tokens, instead of a layer's attention.

    Its input is projected to three times `width`: a gate before, a gate after, and what is
    convolved, each channel by itself.

    taps: the tokens that one sees, itself included; at least 2
    width: channels
    bias: whether both projections and the convolution have one
    """

    taps: int
    width: int
    bias: bool = False

    @property
    def layout(self) -> StateKV:
        """What its layer keeps: `conv`, the inputs of the latest tokens, the newest last."""
        return StateKV(tensors=(StateTensor("conv", (self.taps - 1, self.width)),))


@frozen(kw_only=True)
class Head:
    """What happens to a product with the output matrix before it is a score.

    scale: it is multiplied by it
    softcap: the bound of scores, `softcap * tanh(score / softcap)`; 0 for none
    """

    scale: float = 1.0
    softcap: float = 0.0


@frozen(kw_only=True)
class Shard:
    """Which part of a model a rank computes, of `count` equal ones.

    vocab: how many token ids the whole model has, where it is cut; the last ranks may hold fewer
        than the others, and their embeddings and output matrices are padded with zeros
    """

    index: int = 0
    count: int = 1
    vocab: int = 0

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(
                f"shard {self.index} of {self.count}: the first is 0, and the last one less than "
                "their count"
            )


@frozen(kw_only=True)
class LayerConfig:
    """One decoder layer.

    prefix: begins the names of its parameters
    group: its KV group
    scale, window, softcap: as in `LayerInfo`
    rope: which of `ModelConfig.ropes`; None for a layer that turns nothing
    experts: None for a dense layer
    latent: attention over latent vectors, with `ModelConfig.head_dim` their width and `kv_heads` 1;
        None for attention over keys and values
    conv: what the layer has instead of attention; None for attention
    """

    index: int
    prefix: str
    group: int
    scale: float
    window: int | None = None
    softcap: float = 0.0
    rope: int | None = 0
    experts: Experts | None = None
    latent: LatentAttention | None = None
    conv: ShortConv | None = None


@frozen(kw_only=True)
class ModelConfig:
    """A decoder as data: shapes, differences between layers, and KV groups. Sizes are in elements.

    norm_offset: whether the checkpoint's norms hold w for a weight of 1 + w
    wide_norms: whether norms multiply by their weights before they round; so do those with an
        offset
    pre_norm: whether a norm comes before attention and before the feed-forward part
    post_norm: whether one comes after each, before its result is added
    embedding_scale: embeddings are multiplied by it, rounded to their type
    residual_scale: what attention and the feed-forward part give is multiplied by it
    shard: which part of the model this is; sizes are those of the part, and sums over all parts
        are `Ops.all_reduce`
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
    ropes: tuple[Rope, ...]
    layers: tuple[LayerConfig, ...]
    kv_groups: tuple[KVGroup, ...]
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QkNorm = field(default=QkNorm.NONE, validator=instance_of(QkNorm))
    norm_offset: bool = False
    wide_norms: bool = False
    pre_norm: bool = True
    post_norm: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    head: Head = field(default=Head(), validator=instance_of(Head))
    tied_embeddings: bool = False
    activation: Activation = field(default=Activation.SILU, validator=instance_of(Activation))
    dtype: str = "float32"
    eos_ids: tuple[int, ...] = ()
    features: frozenset[Feature] = frozenset()
    shard: Shard = Shard()
    ignored_fields: tuple[str, ...] = ()

    @property
    def full_vocab(self) -> int:
        """How many token ids the whole model has, and so how many scores a token gets."""
        return self.shard.vocab or self.vocab
