"""How the pages of a layer lie in memory, by layout."""

from __future__ import annotations

from math import prod

import torch

from headstock.spi import FullKV, KVGroup, LatentKV, Layout, StateKV

_ALIGNMENT = 16
"""Bytes of which every tensor of a state has a multiple, so that each begins where kernels may load
whole vectors.
"""


def page_shape(layout: Layout, page_tokens: int) -> tuple[int, ...]:
    """Return the shape of one layer's page: [2, page_tokens, kv_heads, head_dim] for full KV.

    raises: ValueError for a layout that has no pool yet
    """
    # One tensor for keys and values of a page: they are written by one kernel, and the backends
    # that take two tensors get views.
    if isinstance(layout, FullKV) and layout.k_dim == layout.v_dim:
        return (2, page_tokens, layout.kv_heads, layout.k_dim)
    raise ValueError(f"no pool has pages of {layout}; wanted keys and values of one width")


def count_page_bytes(
    group: KVGroup, page_tokens: int, kv_dtype: torch.dtype, dtype: torch.dtype
) -> int:
    """Count the bytes of one page of one layer.

    kv_dtype: of keys, values and latent vectors where the group names none
    dtype: the model's, of states that name none
    """
    layout = group.layout
    itemsize = choose_dtype(group.dtype, kv_dtype).itemsize
    if isinstance(layout, FullKV):
        return page_tokens * layout.kv_heads * (layout.k_dim + layout.v_dim) * itemsize
    if isinstance(layout, LatentKV):
        return page_tokens * layout.dim * itemsize
    return sum(count_state_bytes(layout, dtype))


def count_state_bytes(layout: StateKV, dtype: torch.dtype) -> list[int]:
    """Count the bytes that each tensor of a state takes in a page."""
    sizes = [
        prod(tensor.shape) * choose_dtype(tensor.dtype, dtype).itemsize for tensor in layout.tensors
    ]
    return [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]


def choose_dtype(name: str | None, default: torch.dtype) -> torch.dtype:
    """Return the torch type of this name, which was checked when the model was read.

    default: where there is no name
    """
    dtype: torch.dtype = default if name is None else getattr(torch, name)
    return dtype
