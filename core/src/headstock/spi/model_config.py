"""A decoder described as data: its shapes, its layers and how they share KV."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import cached_property
from typing import Any, ClassVar

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


@frozen(kw_only=True)
class QueryScale:
    """Queries times `1 + rate * ln(1 + floor(position / length))`, after they are turned."""

    rate: float
    length: float


class Scoring(Enum):
    """How router scores become probabilities. SIGMOID: each expert's independently."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@frozen(kw_only=True)
class ClampedGate:
    """A gate whose numbers are bounded: `gate * sigmoid(slope * gate) * (up + 1)`.

    limit: the most that `gate` is, and the most that `up` is either way
    """

    limit: float
    slope: float


@frozen(kw_only=True)
class Experts:
    """A mixture of experts; a token uses the most probable ones.

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
    score_bias: whether scores have a bias, before they are probabilities
    bias: whether both maps of an expert have one
    gate: what its gate is; None for `ModelConfig.activation`
    has_scales: whether a token's weight of an expert is multiplied by a number of that expert
    beside_mlp: whether the layer has its dense feed-forward part too, and adds what both give. What
        experts are chosen by, and what they are given, then have norms of their own, and so has
        what each of both gives
    first, held: the experts that a rank has where they are cut by number: `held` from `first` on,
        of which the last rank may lack some; `held` is 0 for all
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
    score_bias: bool = False
    bias: bool = False
    gate: ClampedGate | None = None
    has_scales: bool = False
    beside_mlp: bool = False
    first: int = 0
    held: int = 0

    @property
    def own(self) -> range:
        """The numbers of the experts that this rank has."""
        return range(self.first, min(self.first + (self.held or self.count), self.count))


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
        # One sum for each token, whatever came with it.
        return StateKV(tensors=(StateTensor("conv", (self.taps - 1, self.width)),), alignment=1)


@frozen(kw_only=True)
class DeltaRule:
    """A gated delta rule instead of a layer's attention: a memory of fixed size for each sequence.

    Queries, keys and values are convolved, as by a `ShortConv` without gates, and then go through
    silu. Each key head serves `value_heads // key_heads` value heads.

    taps: the tokens that the convolution sees, itself included; at least 2
    chunk: operations compute so many tokens of a prompt at once, from a multiple of it on, and
        those that fill no chunk one by one
    """

    chunk: ClassVar[int] = 64
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def width(self) -> int:
        """How many elements the values of all heads have."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """How many elements queries, keys and values have together."""
        return 2 * self.key_heads * self.key_dim + self.width

    @property
    def layout(self) -> StateKV:
        """What its layer keeps: `conv`, as a `ShortConv` does, and `delta`, the memories."""
        memory = (self.value_heads, self.key_dim, self.value_dim)
        return StateKV(
            tensors=(
                StateTensor("conv", (self.taps - 1, self.channels)),
                StateTensor("delta", memory, "float32"),
            ),
            alignment=self.chunk,
        )


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
    by_expert: whether a rank has some experts whole, instead of a part of each one's width
    """

    index: int = 0
    count: int = 1
    vocab: int = 0
    by_expert: bool = False

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(
                f"shard {self.index} of {self.count}: the first is 0, and the last one less than "
                "their count"
            )


@frozen(kw_only=True)
class LayerSizes:
    """The sizes of a layer, in elements.

    heads: of queries
    kv_heads: of keys and of values
    intermediate: the width of its dense feed-forward part
    """

    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int


@frozen(kw_only=True)
class LayerConfig:
    """One decoder layer.

    prefix: begins the names of its parameters
    group: its KV group
    scale, window, softcap: as in `LayerInfo`
    sinks: the parameter that holds `LayerInfo.sinks`; None for a layer without
    rope: which of `ModelConfig.ropes`; None for a layer that turns nothing
    experts: None for a dense layer
    latent: attention over latent vectors, with `ModelConfig.head_dim` their width and `kv_heads` 1;
        None for attention over keys and values
    conv, delta: what the layer has instead of attention; None for attention
    has_gate: whether what attention gives is multiplied by the sigmoid of a map of the layer's
        input, before its projection
    sizes: its own; None for those of `ModelConfig`. `ModelConfig.sizes_of` says what counts
    has_own_values: whether checkpoints have a map for values; else values are what keys are made
        of, before their norm and before they are turned
    scalar: the parameter, [1], that the stream is multiplied by after the layer; None for none
    k_scale, v_scale: keys and values are divided by them before they are stored, as attention
        multiplies by those of `LayerInfo`; latent vectors by the first, which equals the second.
        The start sets them for 8-bit pools, to what the checkpoint has
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
    delta: DeltaRule | None = None
    has_gate: bool = False
    sinks: str | None = None
    sizes: LayerSizes | None = None
    has_own_values: bool = True
    scalar: str | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def state(self) -> StateKV | None:
        """What it keeps instead of keys and values; None for attention."""
        kept = self.conv or self.delta
        return None if kept is None else kept.layout

    @property
    def has_mlp(self) -> bool:
        """Whether it has a dense feed-forward part."""
        return self.experts is None or self.experts.beside_mlp


@frozen(kw_only=True)
class ModelConfig:
    """A decoder as data: shapes, differences between layers, and KV groups. Sizes are in elements.

    heads, kv_heads, head_dim, intermediate: of layers without sizes of their own
    norm_offset: whether the checkpoint's norms hold w for a weight of 1 + w
    wide_norms: whether norms multiply by their weights before they round; so do those with an
        offset
    pre_norm: whether a norm comes before attention and before the feed-forward part
    post_norm: whether one comes after each, before its result is added
    value_norm: whether each head of values has a norm, which has no weight
    query_scale: by what queries grow with their positions; None for nothing
    embedding_scale: embeddings are multiplied by it, rounded to their type
    residual_scale: what attention and the feed-forward part give is multiplied by it
    shard: which part of the model this is; sizes are those of the part, and sums over all parts
        are `Ops.all_reduce`
    placeholders: tokens that stand for inputs other than text, each with what it stands for, such
        as "an image"; a prompt that has one is refused
    draft_layers: how many layers, the last ones, only guess further tokens, by `Model.draft`
    is_capturable: whether a CUDA graph may replay the forward pass and the scores
    capture_obstacle: why it may not, in words that follow "steps are not replayed as graphs:"
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
    value_norm: bool = False
    norm_offset: bool = False
    wide_norms: bool = False
    pre_norm: bool = True
    post_norm: bool = False
    query_scale: QueryScale | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    head: Head = field(default=Head(), validator=instance_of(Head))
    tied_embeddings: bool = False
    activation: Activation = field(default=Activation.SILU, validator=instance_of(Activation))
    dtype: str = "float32"
    eos_ids: tuple[int, ...] = ()
    features: frozenset[Feature] = frozenset()
    shard: Shard = Shard()
    placeholders: tuple[tuple[int, str], ...] = ()
    draft_layers: int = 0
    is_capturable: bool = True
    capture_obstacle: str = ""
    ignored_fields: tuple[str, ...] = ()

    @property
    def own_layers(self) -> tuple[LayerConfig, ...]:
        """The layers without those that only guess further tokens."""
        return self.layers[: len(self.layers) - self.draft_layers]

    @property
    def full_vocab(self) -> int:
        """How many token ids the whole model has, and so how many scores a token gets."""
        return self.shard.vocab or self.vocab

    @property
    def sizes(self) -> LayerSizes:
        """The sizes of layers without their own."""
        return self._sizes

    # Made once: operations ask in every layer of every step.
    @cached_property
    def _sizes(self) -> LayerSizes:
        return LayerSizes(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate=self.intermediate,
        )

    def sizes_of(self, layer: LayerConfig) -> LayerSizes:
        """The sizes of one of its layers."""
        return layer.sizes or self._sizes
