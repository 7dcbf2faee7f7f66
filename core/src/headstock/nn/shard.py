"""A decoder cut for several ranks: heads, widths and the vocabulary in equal parts."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from headstock.nn.vocab_shard import WORD
from headstock.spi import (
    DeltaRule,
    Experts,
    FullKV,
    KVGroup,
    LatentKV,
    LayerConfig,
    LayerSizes,
    ModelConfig,
    Shard,
    ShortConv,
)


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """The part of the decoder that one rank computes.

    Its heads, the widths of its feed-forward parts, the channels of its convolutions and its
    vocabulary are those of the rank, and so are its experts with `Shard.by_expert`. Where there are
    fewer heads of keys and values than ranks, several ranks hold the same one. A number of experts
    that the ranks do not divide is padded, and so is a vocabulary, to whole words of a mask.
    raises: ValueError for sizes that the ranks do not divide, and layouts that cannot be cut
    """
    if shard.count == 1:
        return config
    for name, size in _list_sizes(config, shard):
        if size % shard.count:
            raise ValueError(f"{name}: expected a multiple of {shard.count} shards, got {size}")
    layers = tuple(
        evolve(
            layer,
            sizes=None
            if layer.sizes is None
            else _shard_sizes(layer.sizes, shard.count, is_dense=layer.has_mlp),
            experts=_shard_experts(layer.experts, shard),
            conv=_shard_conv(layer.conv, shard.count),
            delta=_shard_delta(layer.delta, shard.count),
        )
        for layer in config.layers
    )
    has_dense = any(layer.has_mlp for layer in config.layers)
    sizes = _shard_sizes(config.sizes, shard.count, is_dense=has_dense)
    return evolve(
        config,
        shard=evolve(shard, vocab=config.vocab),
        vocab=-(-config.vocab // (shard.count * WORD)) * WORD,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        intermediate=sizes.intermediate,
        layers=layers,
        kv_groups=tuple(
            _shard_group(group, layers, (layers[group.layers[0]].sizes or sizes).kv_heads)
            for group in config.kv_groups
        ),
    )


def _shard_sizes(sizes: LayerSizes, count: int, *, is_dense: bool) -> LayerSizes:
    """The sizes of one rank's part of a layer.   raises: ValueError"""
    if sizes.kv_heads % count and count % sizes.kv_heads:
        raise ValueError(
            f"num_key_value_heads: expected a divisor or a multiple of {count} shards, got "
            f"{sizes.kv_heads}"
        )
    return evolve(
        sizes,
        heads=sizes.heads // count,
        kv_heads=max(1, sizes.kv_heads // count),
        intermediate=sizes.intermediate // count if is_dense else sizes.intermediate,
    )


def _list_sizes(config: ModelConfig, shard: Shard) -> Iterator[tuple[str, int]]:
    """The sizes that shards must divide, by their names in config.json."""
    for layer in config.layers:
        sizes = config.sizes_of(layer)
        yield "num_attention_heads", sizes.heads
        if layer.conv is not None:
            yield "hidden_size", layer.conv.width
        if layer.delta is not None:
            yield "linear_num_key_heads", layer.delta.key_heads
        if layer.has_mlp:
            yield "intermediate_size", sizes.intermediate
        if layer.experts is not None:
            if not shard.by_expert:
                yield "the width of an expert", layer.experts.intermediate
            yield "the width of the shared expert", layer.experts.shared


def _shard_experts(experts: Experts | None, shard: Shard) -> Experts | None:
    """Every expert with a part of its width, or some experts whole; all ranks route alike.

    raises: ValueError where a rank would have no expert
    """
    if experts is None:
        return None
    count, shared = shard.count, experts.shared // shard.count
    if not shard.by_expert:
        return evolve(experts, intermediate=experts.intermediate // count, shared=shared)
    held = -(-experts.count // count)
    if held * (count - 1) >= experts.count:
        raise ValueError(
            f"experts of a layer: expected some for each of {count} shards, got {experts.count}, "
            f"which leave the last one none after {held} each"
        )
    return evolve(experts, first=shard.index * held, held=held, shared=shared)


def _shard_conv(conv: ShortConv | None, count: int) -> ShortConv | None:
    """The convolution of a part of the channels: each is convolved by itself."""
    return None if conv is None else evolve(conv, width=conv.width // count)


def _shard_delta(delta: DeltaRule | None, count: int) -> DeltaRule | None:
    """The delta rule of some of the heads: values go with the keys that serve them."""
    if delta is None:
        return None
    keys, values = delta.key_heads // count, delta.value_heads // count
    return evolve(delta, key_heads=keys, value_heads=values)


def _shard_group(group: KVGroup, layers: tuple[LayerConfig, ...], kv_heads: int) -> KVGroup:
    """The group with the heads or the channels of one rank.

    layers: of the rank
    raises: ValueError
    """
    state = layers[group.layers[0]].state
    if state is not None:
        return evolve(group, layout=state)
    # All heads read the same vectors, so each rank keeps them whole.
    if isinstance(group.layout, LatentKV):
        return group
    if not isinstance(group.layout, FullKV):
        raise ValueError(
            f"KV in the layout {type(group.layout).__name__} cannot be cut into shards"
        )
    return evolve(group, layout=evolve(group.layout, kv_heads=kv_heads))
