"""What operations work out once a step, since all layers of a rope or a KV group use the same."""

from __future__ import annotations

import torch
from torch import Tensor

from headstock.nn.delta_spans import TokenSpans
from headstock.nn.kv import kv_cells
from headstock.nn.rope import CosSin
from headstock.spi import Batch, LayerConfig, ModelConfig, Params, Stream


def find_rotations(x: Stream, params: Params, rope: int, batch: Batch) -> CosSin:
    """The rotations of the step's tokens.   writes: x.shared"""
    cos_sin: CosSin | None = x.shared.get(("rope", rope))
    if cos_sin is None:
        table = params[f"rope.{rope}"].tensor
        cos_sin = CosSin.at_positions(table, batch.positions, x.total.dtype)
        x.shared["rope", rope] = cos_sin
    return cos_sin


def find_cells(x: Stream, layer: LayerConfig, batch: Batch) -> Tensor:
    """Where the step's keys and values go in pools of the layer's group.   writes: x.shared"""
    cells = kv_cells(batch.slots[layer.group], batch.pools[layer.index].shape[2])
    x.shared["cells", layer.group] = cells
    return cells


def scale_queries(q: Tensor, config: ModelConfig, x: Stream, batch: Batch) -> Tensor:
    """The queries times their `QueryScale`, if the model has one.   writes: q, x.shared"""
    scale = config.query_scale
    if scale is None:
        return q
    factors: Tensor | None = x.shared.get("query_scale")
    if factors is None:
        periods = torch.floor(batch.positions / scale.length)
        factors = torch.log1p(periods).mul_(scale.rate).add_(1).to(q.dtype)[:, None, None]
        x.shared["query_scale"] = factors
    return q.mul_(factors)


def find_spans(x: Stream, batch: Batch) -> TokenSpans:
    """Which of the step's tokens delta rules take in chunks.   writes: x.shared"""
    spans: TokenSpans | None = x.shared.get("spans")
    if spans is None:
        spans = TokenSpans.of(batch, may_read=batch.starts.device.type == "cpu")
        x.shared["spans"] = spans
    return spans
