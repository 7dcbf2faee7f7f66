"""Scales of experts in 8 bits."""

from __future__ import annotations

from attrs import evolve, frozen
from torch import Tensor

from headstock.spi import Weight
from headstock_triton.tiles import Tile


@frozen(eq=False)
class GroupScales:
    """Scales of experts in 8 bits, each of some rows and columns of a matrix.

    numbers: [experts, groups of rows, groups of columns]
    """

    numbers: Tensor
    rows: int
    columns: int

    @classmethod
    def of(cls, weight: Weight) -> GroupScales | None:
        """Those of a prepared weight; None for a plain one."""
        if weight.scales is None or weight.format is None or weight.format.group is None:
            return None
        return cls(weight.scales, *weight.format.group)

    def fit(self, tile: Tile, width: int) -> Tile:
        """The tile, of which a step of the depth lies in one group."""
        depth = tile.k
        while self.columns < width and self.columns % depth:
            depth //= 2
        return evolve(tile, k=depth)
