"""A step without memory, for families that look at their forward pass before weights load."""

from __future__ import annotations

import torch
from torch import Tensor

from headstock.spi import Batch, FullKV, ModelConfig

_PAGE_SIZE = 4


def make_meta_batch(config: ModelConfig, num_tokens: int) -> Batch:
    """A step of one row on the meta device, over pages for all layers of a model with full KV.

    raises: ValueError for other layouts
    """

    def make_ids(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device="meta")

    pools = []
    for layer in config.layers:
        layout = config.kv_groups[layer.group].layout
        if not isinstance(layout, FullKV):
            raise ValueError(f"layer {layer.index} keeps {layout}; expected keys and values")
        shape = (1, 2, _PAGE_SIZE, layout.kv_heads, layout.k_dim)
        pools.append(torch.zeros(shape, device="meta"))
    return Batch(
        tokens=make_ids(num_tokens),
        positions=make_ids(num_tokens),
        token_rows=make_ids(num_tokens),
        row_ids=make_ids(1),
        starts=make_ids(1),
        query_start=make_ids(2, dtype=torch.int32),
        max_query_len=num_tokens,
        slots=tuple(make_ids(num_tokens) for _ in config.kv_groups),
        pools=tuple(pools),
        logit_indices=None,
    )
