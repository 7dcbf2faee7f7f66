"""How the pages of a layer lie in memory, by layout."""

from __future__ import annotations

from headstock.spi import FullKV, Layout


def page_shape(layout: Layout, page_tokens: int) -> tuple[int, ...]:
    """Return the shape of one layer's page: [2, page_tokens, kv_heads, head_dim] for full KV.

    raises: ValueError for a layout that has no pool yet
    """
    # One tensor for keys and values of a page: they are written by one kernel, and the backends
    # that take two tensors get views.
    if isinstance(layout, FullKV) and layout.k_dim == layout.v_dim:
        return (2, page_tokens, layout.kv_heads, layout.k_dim)
    raise ValueError(f"no pool has pages of {layout}; wanted keys and values of one width")
