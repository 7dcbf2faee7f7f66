"""The kernel that merges shared prefixes, without a GPU."""

from __future__ import annotations

import pytest
import torch
from plugins.triton_ops.test_compile import compiled

from headstock_fa.merge import merge_prefixes

__all__ = ["compiled"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tritons_compiler_takes_the_kernel(compiled: list[str], dtype: torch.dtype) -> None:
    out, lse = torch.zeros((3, 16, 128), dtype=dtype), torch.zeros((3, 16))
    merge_prefixes(out, lse, torch.zeros_like(out), lse, torch.zeros(3, dtype=torch.int32))
    assert compiled == ["merge_kernel"]
