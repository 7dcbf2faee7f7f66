"""The device's buffers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from headstock.engine.buffers import allocate
from headstock.spi import KVGroup


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_R9_pages_of_failed_rows_become_finite_and_others_stay(dtype: torch.dtype) -> None:
    group = KVGroup(layers=(0, 1), kind="full", kv_heads=2, head_dim=4)
    buffers = allocate(
        (group,), device=torch.device("cpu"), kv_dtype=dtype, page_size=4, num_pages=5, rows=3, max_len=12
    )
    buffers.page_tables[0][1, :2] = torch.tensor([4, 2], dtype=torch.int32)
    buffers.page_tables[0][2, :2] = torch.tensor([3, 2], dtype=torch.int32)
    for pool in buffers.pools:
        pool.copy_(torch.arange(pool.numel()).view(pool.shape).remainder(97).to(dtype))
    before = [pool.clone() for pool in buffers.pools]
    for pool in buffers.pools:
        values = pool.float()
        values[2:5, 0, 1] = math.nan
        pool.copy_(values.to(dtype))

    then = tuple(table.clone() for table in buffers.page_tables)
    buffers.page_tables[0][1] = torch.tensor([3, 5, 0], dtype=torch.int32)  # another request's by now
    buffers.clean(np.array([1]), then)

    for pool, old in zip(buffers.pools, before, strict=True):
        assert pool[[2, 4]].float().isfinite().all() and (pool[[2, 4], 0, 1].float() == 0).all()
        assert pool[3, 0, 1].float().isnan().all()
        old = old.float()
        old[[2, 4], 0, 1] = 0
        assert torch.equal(pool.float()[[0, 1, 2, 4, 5]], old[[0, 1, 2, 4, 5]])
