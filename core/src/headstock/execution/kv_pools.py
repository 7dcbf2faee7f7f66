"""How the pages of a layer lie in memory, by layout."""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from torch import Tensor

from headstock.spi import FullKV, KVGroup, KVLayer, LatentKV, Layout, StateKV

_ALIGNMENT = 16
"""Bytes of which every tensor of a state has a multiple, so that each begins where kernels may load
whole vectors.
"""


def page_shape(layout: Layout, page_tokens: int) -> tuple[int, ...]:
    """Return the shape of one layer's page in memory.

    It is [2, page_tokens, kv_heads, dim] for keys and values of one width, [numbers] where their
    widths differ, keys first, and [page_tokens, dim] for latent vectors.

    raises: ValueError for a state, whose page is bytes
    """
    # One tensor for keys and values of a page: they are written by one kernel, and the backends
    # that take two tensors get views.
    if isinstance(layout, FullKV) and layout.k_dim == layout.v_dim:
        return (2, page_tokens, layout.kv_heads, layout.k_dim)
    if isinstance(layout, FullKV):
        return (page_tokens * layout.kv_heads * (layout.k_dim + layout.v_dim),)
    if isinstance(layout, LatentKV):
        return (page_tokens, layout.dim)
    raise ValueError(f"a page of {layout} is bytes, of several types")


def allocate_pool(
    group: KVGroup,
    num_pages: int,
    page_tokens: int,
    *,
    kv_dtype: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Allocate one layer's pool of zeros: [num_pages + 1, *page]; bytes for a state.

    kv_dtype, dtype: as in `count_page_bytes`
    """
    layout = group.layout
    if isinstance(layout, StateKV):
        return allocate_state_pools(layout, 1, num_pages, dtype=dtype, device=device)[0]
    shape = (num_pages + 1, *page_shape(layout, page_tokens))
    return _zeros(shape, choose_dtype(group.dtype, kv_dtype), device)


def allocate_state_pools(
    layout: StateKV, num_layers: int, num_pages: int, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Allocate the pools of a group that keeps a state, zeros: [layers, num_pages + 1, bytes].

    dtype: of states that name no type
    """
    # In one piece: states are copied, and one copy then serves all layers.
    page = sum(count_state_bytes(layout, dtype))
    return _zeros((num_layers, num_pages + 1, page), torch.uint8, device)


def view_layer(
    pool: Tensor, number: int, group: KVGroup, page_tokens: int, dtype: torch.dtype
) -> KVLayer:
    """View a layer's pool by its parts.

    number: of the group
    dtype: of states that name none
    """
    layout = group.layout
    if isinstance(layout, LatentKV):
        return KVLayer(group=number, latent=pool)
    if isinstance(layout, StateKV):
        return KVLayer(group=number, state=_view_state(pool, layout, dtype))
    heads = (len(pool), page_tokens, layout.kv_heads)
    flat, split = pool.flatten(1), page_tokens * layout.kv_heads * layout.k_dim
    return KVLayer(
        group=number,
        k=flat[:, :split].view(*heads, layout.k_dim),
        v=flat[:, split:].view(*heads, layout.v_dim),
    )


def _view_state(pool: Tensor, layout: StateKV, dtype: torch.dtype) -> dict[str, Tensor]:
    """View the tensors of a state, by name; each is [pages, *shape]."""
    views, start = {}, 0
    for tensor, size in zip(layout.tensors, count_state_bytes(layout, dtype), strict=True):
        kind = choose_dtype(tensor.dtype, dtype)
        used = pool[:, start : start + prod(tensor.shape) * kind.itemsize]
        views[tensor.name] = used.view(kind).view(len(pool), *tensor.shape)
        start += size
    return views


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a tensor of zeros.

    On a CPU its memory is taken only when it is first written: a pool is large and seldom full.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return (
        torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
    )


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

    default: the type if there is no name
    """
    dtype: torch.dtype = default if name is None else getattr(torch, name)
    return dtype
