"""A decoder cut for several ranks: heads, widths and the vocabulary in equal parts."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from headstock.spi import (
    Experts,
    FullKV,
    KVGroup,
    LatentKV,
    LayerConfig,
    ModelConfig,
    Shard,
    ShortConv,
)


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """The part of the decoder that one rank computes.

    Its heads, the widths of its feed-forward parts, the channels of its convolutions and its
    vocabulary are those of the rank. Where there are fewer heads of keys and values than ranks,
    several ranks hold the same one. A vocabulary that the ranks do not divide is padded.
    raises: ValueError for sizes that the ranks do not divide, and layouts that cannot be cut
    """
    if shard.count == 1:
        return config
    for name, size in _list_sizes(config):
        if size % shard.count:
            raise ValueError(f"{name} is {size}, which {shard.count} shards do not divide")
    if config.kv_heads % shard.count and shard.count % config.kv_heads:
        raise ValueError(
            f"num_key_value_heads is {config.kv_heads}, which neither divides {shard.count} shards "
            "nor is divided by them"
        )
    kv_heads = max(1, config.kv_heads // shard.count)
    layers = tuple(
        evolve(
            layer,
            experts=_shard_experts(layer.experts, shard.count),
            conv=_shard_conv(layer.conv, shard.count),
        )
        for layer in config.layers
    )
    has_dense = any(layer.experts is None for layer in config.layers)
    return evolve(
        config,
        shard=evolve(shard, vocab=config.vocab),
        vocab=-(-config.vocab // shard.count),
        heads=config.heads // shard.count,
        kv_heads=kv_heads,
        intermediate=config.intermediate // shard.count if has_dense else config.intermediate,
        layers=layers,
        kv_groups=tuple(_shard_group(group, layers, kv_heads) for group in config.kv_groups),
    )


def _list_sizes(config: ModelConfig) -> Iterator[tuple[str, int]]:
    """The sizes that shards must divide, by their names in config.json."""
    yield "num_attention_heads", config.heads
    for layer in config.layers:
        if layer.conv is not None:
            yield "hidden_size", layer.conv.width
        if layer.experts is None:
            yield "intermediate_size", config.intermediate
        else:
            yield "the width of an expert", layer.experts.intermediate
            yield "the width of the shared expert", layer.experts.shared


def _shard_experts(experts: Experts | None, count: int) -> Experts | None:
    """Every expert with a part of its width: all ranks route alike, and none waits for another."""
    if experts is None:
        return None
    return evolve(
        experts, intermediate=experts.intermediate // count, shared=experts.shared // count
    )


def _shard_conv(conv: ShortConv | None, count: int) -> ShortConv | None:
    """The convolution of a part of the channels: each is convolved by itself."""
    return None if conv is None else evolve(conv, width=conv.width // count)


def _shard_group(group: KVGroup, layers: tuple[LayerConfig, ...], kv_heads: int) -> KVGroup:
    """The group with the heads or the channels of one rank.

    layers: of the rank
    raises: ValueError
    """
    conv = layers[group.layers[0]].conv
    if conv is not None:
        return evolve(group, layout=conv.layout)
    # All heads read the same vectors, so each rank keeps them whole.
    if isinstance(group.layout, LatentKV):
        return group
    if not isinstance(group.layout, FullKV):
        raise ValueError(
            f"KV in the layout {type(group.layout).__name__} cannot be cut into shards"
        )
    return evolve(group, layout=evolve(group.layout, kv_heads=kv_heads))
