"""The one decoder: every family is this, with its own configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from headstock.nn.parameters import LLAMA_NAMES, TensorNames, parameters
from headstock.nn.shard import shard_config
from headstock.spi import Attend, Batch, Model, ModelConfig, Ops, Params


def decoder(
    config: Callable[[Mapping[str, Any]], ModelConfig], names: TensorNames = LLAMA_NAMES
) -> Model:
    """The family whose config.json `config` reads, and whose checkpoints use these names."""
    return Model(
        config=config,
        params=partial(parameters, names=names),
        forward=forward,
        shard=shard_config,
    )


def forward(params: Params, config: ModelConfig, batch: Batch, attend: Attend, ops: Ops) -> Tensor:
    """The batch's normalized hidden states.

    returns: [tokens, hidden]
    writes: batch.pools
    """
    x = ops.embed(batch)
    for layer in config.layers:
        if layer.conv is not None:
            x = ops.short_conv(x, layer, batch)
        elif layer.delta is not None:
            x = ops.delta_rule(x, layer, batch)
        else:
            q = ops.qkv_rope_store(x, layer, batch)
            x = ops.attn_out(x, attend(q, layer.index), layer, batch)
        feed_forward = ops.mlp if layer.experts is None else ops.moe
        x = feed_forward(x, layer, batch)
    return ops.final_norm(x, batch)
