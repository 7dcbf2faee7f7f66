"""Scales of experts in 8 bits."""

from __future__ import annotations

import triton
import triton.language as tl
from attrs import evolve, frozen
from torch import Tensor

from headstock.spi import Weight
from headstock_triton.device_function import device_function
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

    def count_columns(self, width: int) -> int | None:
        """Columns that share a scale, of a row padded to a power of two; None where such a row has
        no whole number of groups.
        """
        block = triton.next_power_of_2(width)
        columns = block if self.columns >= width else self.columns
        return columns if block % columns == 0 else None


@device_function
def load_scales(
    scales,
    row,
    block: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """The scales of some rows.   scales: of row 0    returns: [rows, block / COLUMNS] float32"""
    group = tl.arange(0, block // COLUMNS)[None, :]
    place = scales + (row // ROW_GROUP)[:, None] * GROUPS + group
    return tl.load(place, group < GROUPS, other=0.0).to(tl.float32)


@device_function
def scale_columns(x, scales, COLUMNS: tl.constexpr):
    """Rows times scales.   x: [rows, block]    scales: [rows, block / COLUMNS]"""
    parts = tl.reshape(x, (x.shape[0], x.shape[1] // COLUMNS, COLUMNS))
    return tl.reshape(parts * scales[:, :, None], x.shape)
