"""Mixtures of experts whose routes stay on the device, so that graphs can capture them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import evolve, frozen
from torch import Tensor

from headstock.spi import Activation, ClampedGate, Experts, Weight, WeightKind
from headstock_triton.expert_gates import PLAIN_GATE, ExpertGate
from headstock_triton.expert_rows import can_take_rows, mix_rows
from headstock_triton.expert_scales import GroupScales
from headstock_triton.expert_terms import combine_terms
from headstock_triton.expert_tiles import mix_tiles, multiply_down, multiply_gate_up
from headstock_triton.fp8_rows import can_multiply_rows, quantize_rows
from headstock_triton.packed import MOST_TOKENS
from headstock_triton.pair_blocks import Blocks, arrange_pairs
from headstock_triton.routing import route_tokens
from headstock_triton.tiles import (
    RowTile,
    Shape,
    Table,
    Tiles,
    choose_blocks,
    choose_rounded,
    choose_tiles,
    is_hopper,
)
from headstock_triton.word_experts import WordExperts
from headstock_triton.word_tiles import (
    WordTile,
    choose_word_tile,
    multiply_down_words,
    multiply_gate_up_words,
)


@frozen
class _BlockPlan:
    """How blocks are multiplied: by maps in words, and by others.

    rounds: whether tokens are rounded to FP8, as the experts are
    """

    words: WordTile
    tiles: Tiles
    rounds: bool = False

    @property
    def rows(self) -> int:
        """Of a block."""
        return self.words.rows

    def mix(
        self, x: Tensor, blocks: Blocks, gate_up: Weight, down: Weight, gate: ExpertGate
    ) -> Tensor:
        """The sums of what the blocks' experts make."""
        if isinstance(gate_up, WordExperts):
            inner = multiply_gate_up_words(x, blocks, gate_up, self.words, gate)
        else:
            tokens, token_scales = self.round(x)
            inner = multiply_gate_up(
                tokens,
                blocks,
                gate_up.tensor,
                self.tiles.gate_up,
                GroupScales.of(gate_up),
                gate_up.bias,
                gate,
                token_scales,
            )
        if isinstance(down, WordExperts):
            terms = multiply_down_words(inner, blocks, down, self.words)
        else:
            inner, token_scales = self.round(inner)
            terms = multiply_down(
                inner,
                blocks,
                down.tensor,
                self.tiles.down,
                GroupScales.of(down),
                down.bias,
                token_scales,
            )[None]
        return combine_terms(terms, blocks, x.dtype)

    def round(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The rows as products take them, and their scales in FP8."""
        if not self.rounds:
            return x, None
        rows = quantize_rows(x)
        return rows.values, rows.scales


def _plan_blocks(
    x: Tensor,
    gate_up: Weight,
    down: Weight,
    count: int,
    per_token: int,
    tiles: RowTile | Tiles | None,
    tables: Mapping[Shape, Table] | None,
) -> _BlockPlan:
    """The plan for `count` experts, here or on other ranks."""
    tokens, hidden = x.shape
    inters = down.width if isinstance(down, WordExperts) else down.tensor.shape[2]
    shape = (count, per_token, hidden, inters)
    groups = [each.groups for each in (gate_up, down) if isinstance(each, WordExperts)]
    words = choose_word_tile(tokens, per_token, count, max(groups, default=0))
    if len(groups) == 2:
        return _BlockPlan(words, choose_blocks(tokens, shape, hopper=is_hopper(x.device)))
    if tiles is None and _can_round(x, gate_up, down):
        rounded = choose_rounded(tokens, shape)
        if rounded is not None:
            return _BlockPlan(evolve(words, rows=rounded.rows), rounded, rounds=True)
    tiles = tiles or choose_tiles(tokens, shape, x.device, tables)
    if isinstance(tiles, RowTile):  # whose kernels read plain numbers, and have one gate
        tiles = choose_blocks(tokens, shape, hopper=is_hopper(x.device))
    return _BlockPlan(evolve(words, rows=tiles.rows), tiles)


def _can_round(x: Tensor, gate_up: Weight, down: Weight) -> bool:
    """Whether tokens may be rounded to FP8, as those of products with maps are."""
    formats = (gate_up.format, down.format)
    is_fp8 = all(each and each.kind is WeightKind.FP8_E4M3 for each in formats)
    is_many = len(x) > MOST_TOKENS and x.dtype is torch.bfloat16
    return is_fp8 and is_many and can_multiply_rows(x.device)


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
        in 8 bits or `WordExperts`, with or without biases
    """
    if not len(x):
        return torch.empty_like(x)
    plan = _plan_blocks(x, gate_up, down, len(down.tensor), ids.shape[1], tiles, tables)
    blocks = arrange_pairs(ids, weights, len(down.tensor), slots, page_size, plan.rows)
    return plan.mix(x.contiguous(), blocks, gate_up, down, ExpertGate.of(activation))


def mix_experts(
    x: Tensor,
    scores: Tensor,
    experts: Experts,
    gate_up: Weight,
    down: Weight,
    *,
    slots: Tensor | None = None,
    page_size: int = 0,
    tiles: RowTile | Tiles | None = None,
    tables: Mapping[Shape, Table] | None = None,
    pdl: bool = False,
) -> Tensor:
    """As `fused_mix_experts`, for weights that are plain or in 8 or 4 bits, with or without biases,
    and for any gate of the experts.
    """
    gate = PLAIN_GATE if experts.gate is None else ExpertGate.of(experts.gate)
    is_plain = gate_up.format is None and down.format is None
    if is_plain and gate is PLAIN_GATE and gate_up.bias is None and down.bias is None:
        return fused_mix_experts(
            x,
            scores,
            experts,
            gate_up.tensor,
            down.tensor,
            slots=slots,
            page_size=page_size,
            tiles=tiles,
            tables=tables,
            pdl=pdl,
        )
    if not len(x):
        return torch.empty_like(x)
    if gate is PLAIN_GATE and can_take_rows(gate_up) and can_take_rows(down):
        shape = (experts.count, experts.per_token, x.shape[1], down.tensor.shape[2])
        tile = tiles or choose_tiles(len(x), shape, x.device, tables)
        if isinstance(tile, RowTile):
            routes, _ = route_tokens(scores, experts, slots, page_size, pdl=pdl)
            return mix_rows(x.contiguous(), routes, gate_up, down, tile, pdl=pdl)
    plan = _plan_blocks(x, gate_up, down, experts.count, experts.per_token, tiles, tables)
    _, blocks = route_tokens(scores, experts, slots, page_size, plan.rows, pdl=pdl)
    assert blocks is not None, "rows were given"
    return plan.mix(x.contiguous(), blocks, gate_up, down, gate)


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
    pdl: bool = False,
) -> Tensor:
    """The weighted sum of the outputs of each token's experts.

    The order of the sum is that of the token's slots, independent of other tokens.

    x, result: [tokens, hidden]    scores: [tokens, experts]
    gate_up: [experts, 2 * intermediate, hidden]    down: [experts, hidden, intermediate]
    slots: [tokens] int64, where keys and values go. Tokens in the dummy page, below `page_size`,
    are padding: they get no expert, and their result is 0.
    tiles: the tile sizes; by default from the tables, else from `choose_tiles`
    """
    tokens, hidden = x.shape
    if not tokens:
        return torch.empty_like(x)
    x = x.contiguous()
    shape = (experts.count, experts.per_token, hidden, experts.intermediate)
    tiles = tiles or choose_tiles(tokens, shape, x.device, tables)
    # Pairs that are processed one by one need no blocks.
    rows = tiles.rows if isinstance(tiles, Tiles) else 0
    routes, blocks = route_tokens(scores, experts, slots, page_size, rows, pdl=pdl)
    if isinstance(tiles, RowTile):
        return mix_rows(x, routes, Weight(tensor=gate_up), Weight(tensor=down), tiles, pdl=pdl)
    assert blocks is not None, "rows were given"
    return mix_tiles(x, blocks, gate_up, down, tiles)
