"""The one decoder: every family is this, with its own configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from headstock.nn.draft_layers import forward_drafts
from headstock.nn.layers import run_layers
from headstock.nn.parameters import LLAMA_NAMES, TensorNames, parameters
from headstock.nn.shard import shard_config
from headstock.spi import Attend, Batch, Model, ModelConfig, Ops, Params


def decoder(
    config: Callable[[Mapping[str, Any]], ModelConfig],
    names: TensorNames = LLAMA_NAMES,
    draft_config: Callable[[Mapping[str, Any], ModelConfig], ModelConfig] | None = None,
) -> Model:
    """The family whose config.json `config` reads, and whose checkpoints use these names.

    draft_config: as in `Model`; its checkpoints then have `TensorNames.drafts`
    """
    return Model(
        config=config,
        params=partial(parameters, names=names),
        forward=forward,
        shard=shard_config,
        draft_config=draft_config,
        draft=None if draft_config is None else forward_drafts,
    )


def forward(params: Params, config: ModelConfig, batch: Batch, attend: Attend, ops: Ops) -> Tensor:
    """The batch's normalized hidden states.

    returns: [tokens, hidden]
    writes: batch.pools
    """
    x = run_layers(ops.embed(batch), config.own_layers, batch, attend, ops)
    return ops.final_norm(x, batch)
