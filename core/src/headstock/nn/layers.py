"""The layers of a decoder, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from headstock.spi import Attend, Batch, LayerConfig, Ops, Stream


def run_layers(
    x: Stream, layers: Sequence[LayerConfig], batch: Batch, attend: Attend, ops: Ops
) -> Stream:
    """The stream behind these layers.   writes: x, batch.pools"""
    for layer in layers:
        if layer.conv is not None:
            x = ops.short_conv(x, layer, batch)
        elif layer.delta is not None:
            x = ops.delta_rule(x, layer, batch)
        else:
            q = ops.qkv_rope_store(x, layer, batch)
            x = ops.attn_out(x, attend(q, layer.index), layer, batch)
        feed_forward = ops.mlp if layer.experts is None else ops.moe
        x = feed_forward(x, layer, batch)
    return x
