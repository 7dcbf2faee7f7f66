"""Mixtures of experts whose routes stay on the device, so that graphs can capture them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headstock.spi import Activation, ClampedGate, Experts, Weight
from headstock_triton.expert_gates import ExpertGate
from headstock_triton.expert_rows import mix_rows
from headstock_triton.expert_scales import PLAIN, GroupScales
from headstock_triton.expert_tiles import mix_tiles
from headstock_triton.pair_blocks import arrange_pairs
from headstock_triton.routing import route_tokens
from headstock_triton.tiles import (
    RowTile,
    Shape,
    Table,
    Tiles,
    choose_blocks,
    choose_tiles,
    is_hopper,
)


def mix_chosen_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Weight,
    down: Weight,
    activation: Activation | ClampedGate = Activation.SILU,
    *,
    slots: Tensor | None = None,
    page_size: int = 0,
    tiles: RowTile | Tiles | None = None,
    tables: Mapping[Shape, Table] | None = None,
) -> Tensor:
    """As `fused_mix_experts`, where each token's experts are known.

    x, result: [tokens, hidden]    weights: [tokens, per_token]
    ids: [tokens, per_token] int64; the number of experts is none
    gate_up: [experts, 2 * intermediate, hidden]    down: [experts, hidden, intermediate]; plain, or
        in 8 bits, with or without biases
    """
    (tokens, hidden), (count, _, inters) = x.shape, down.tensor.shape
    if not tokens:
        return torch.empty_like(x)
    x = x.contiguous()
    shape = (count, ids.shape[1], hidden, inters)
    tiles = tiles or choose_tiles(tokens, shape, x.device, tables)
    if isinstance(tiles, RowTile):  # whose kernels read plain numbers, and have one gate
        tiles = choose_blocks(tokens, shape, hopper=is_hopper(x.device))
    return mix_tiles(
        x,
        arrange_pairs(ids, weights, count, slots, page_size, tiles.rows),
        gate_up.tensor,
        down.tensor,
        tiles,
        (GroupScales.of(gate_up), GroupScales.of(down)),
        (gate_up.bias, down.bias),
        ExpertGate.of(activation),
    )


def fused_mix_experts(
    x: Tensor,
    scores: Tensor,
    experts: Experts,
    gate_up: Tensor,
    down: Tensor,
    *,
    slots: Tensor | None = None,
    page_size: int = 0,
    tiles: RowTile | Tiles | None = None,
    tables: Mapping[Shape, Table] | None = None,
    scales: tuple[GroupScales | None, GroupScales | None] = PLAIN,
    pdl: bool = False,
) -> Tensor:
    """The weighted sum of the outputs of each token's experts.

    The order of the sum is that of the token's slots, independent of other tokens.

    x, result: [tokens, hidden]    scores: [tokens, experts]
    gate_up: [experts, 2 * intermediate, hidden]    down: [experts, hidden, intermediate]
    slots: [tokens] int64, where keys and values go. Tokens in the dummy page, below `page_size`,
    are padding: they get no expert, and their result is 0.
    scales: of gate and up and of down, where these are in 8 bits
    tiles: the tile sizes; by default from the tables, else from `choose_tiles`
    """
    tokens, hidden = x.shape
    if not tokens:
        return torch.empty_like(x)
    x = x.contiguous()
    shape = (experts.count, experts.per_token, hidden, experts.intermediate)
    tiles = tiles or choose_tiles(tokens, shape, x.device, tables)
    if scales != PLAIN and isinstance(tiles, RowTile):  # whose kernels read plain numbers
        tiles = choose_blocks(tokens, shape, hopper=is_hopper(x.device))
    # Pairs that are processed one by one need no blocks.
    rows = tiles.rows if isinstance(tiles, Tiles) else 0
    routes, blocks = route_tokens(scores, experts, slots, page_size, rows, pdl=pdl)
    if isinstance(tiles, RowTile):
        return mix_rows(x, routes, gate_up, down, tiles, pdl=pdl)
    assert blocks is not None, "rows were given"
    return mix_tiles(x, blocks, gate_up, down, tiles, scales)
