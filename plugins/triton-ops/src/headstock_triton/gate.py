"""Products with gate and up that include the activation, where that is faster."""

from __future__ import annotations

from torch import Tensor

from headstock.spi import Weight
from headstock_triton import packed
from headstock_triton.few_linear import choose_few_gated_tile, is_few
from headstock_triton.gated_linear import (
    choose_large_tile,
    count_processors,
    multiply_gated_tiles,
)
from headstock_triton.split_linear import choose_gated_tile, multiply_gated
from headstock_triton.tiles import is_hopper


def multiply_gate(
    x: Tensor, weight: Weight, *, most_split: int, large: bool, pdl: bool
) -> Tensor | None:
    """silu(x G^T + g) * (x U^T + u); None where a product and an activation are as fast.

    x: [tokens, in]    weight: [2 * out, in], whose halves are gate and up
    most_split, large: the options `split_linear` and `large_linear`
    returns: [tokens, out]
    """
    tokens, width = x.shape
    if weight.format is not None:
        few = 0 < tokens <= packed.count_most_tokens(weight)
        return packed.multiply_packed_gated(x, weight, pdl=pdl) if few else None
    if weight.bias is not None or x.dtype.itemsize != 2:
        return None
    inters = len(weight.tensor) // 2
    if tokens <= most_split:
        if is_few(x, 2 * inters):
            return multiply_gated(x, weight, choose_few_gated_tile(tokens), pdl=pdl)
        small = choose_gated_tile(tokens, width, inters)
        if small is not None:
            return multiply_gated(x, weight, small, pdl=pdl)
    if large and is_hopper(x.device):
        processors = count_processors(x.device)
        tile = choose_large_tile(tokens, width, inters, processors=processors)
        if tile is not None:
            return multiply_gated_tiles(x, weight.tensor, tile)
    return None
