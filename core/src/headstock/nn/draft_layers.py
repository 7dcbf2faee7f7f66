"""Layers that guess further tokens, behind a decoder (DeepSeek-V3, arXiv 2412.19437, 2.2)."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from headstock.nn.layers import run_layers
from headstock.nn.param_specs import NamedSpecs, make_linear_specs, make_norm_spec
from headstock.spi import Attend, Batch, ModelConfig, Ops, Params, Stream


@frozen(kw_only=True)
class DraftNames:
    """What checkpoints call the tensors of layers that guess further tokens, whole names.

    layers: begins those of the layers, which are numbered from 0
    """

    layers: str = "mtp.layers."
    embed_norm: str = "mtp.pre_fc_norm_embedding"
    hidden_norm: str = "mtp.pre_fc_norm_hidden"
    join: str = "mtp.fc"
    norm: str = "mtp.norm"


def make_draft_specs(config: ModelConfig, names: DraftNames) -> NamedSpecs:
    """Parameters beside those of the layers."""
    yield "draft_embed_norm", make_norm_spec(config, config.hidden, names.embed_norm)
    yield "draft_hidden_norm", make_norm_spec(config, config.hidden, names.hidden_norm)
    yield from make_linear_specs(
        "draft_join", 2 * config.hidden, (names.join,), (config.hidden,), False
    )
    yield "draft_norm", make_norm_spec(config, config.hidden, names.norm)


def rename_layers(config: ModelConfig, names: DraftNames) -> tuple[tuple[str, str], ...]:
    """How stored names of the layers begin, each with what they are called as the last ones."""
    first = len(config.layers) - config.draft_layers
    return tuple(
        (f"{names.layers}{number}.", f"model.layers.{first + number}.")
        for number in range(config.draft_layers)
    )


def forward_drafts(
    params: Params, config: ModelConfig, hidden: Tensor, batch: Batch, attend: Attend, ops: Ops
) -> Tensor:
    """See `Model.draft`.   writes: batch.pools"""
    fine: Any = ops  # the norms and maps here are no decoder's
    eps = config.norm_eps
    embedded = fine.rms_norm(ops.embed(batch).settle(), params["draft_embed_norm"], eps)
    known = fine.rms_norm(hidden, params["draft_hidden_norm"], eps)
    x = Stream(fine.linear(torch.cat((embedded, known), -1), params["draft_join"], batch))
    x = run_layers(x, config.layers[len(config.own_layers) :], batch, attend, ops)
    normed: Tensor = fine.rms_norm(x.settle(), params["draft_norm"], eps)
    return normed
