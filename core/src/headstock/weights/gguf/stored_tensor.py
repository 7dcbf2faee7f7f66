"""A tensor of a file, and what makes its numbers those of the published one."""

from __future__ import annotations

import math

import torch
from attrs import frozen
from torch import Tensor

from headstock.weights.gguf.header import GgufTensor


@frozen
class Interleaving:
    """An order in which groups have the first block of each of their parts, then the second.

    start: how many lie before the groups, in order
    groups: how many groups there are, of the same size
    parts: how many parts take turns in a group
    size: how many rows a block has
    """

    start: int
    groups: int
    parts: int
    size: int

    def divides(self, count: int) -> bool:
        """Whether so many rows can have this order."""
        if min(self.groups, self.parts, self.size) < 1 or not 0 <= self.start < count:
            return False
        return not (count - self.start) % (self.groups * self.parts * self.size)

    def list_places(self, count: int) -> Tensor:
        """Which row of the file each row is.   count: of rows that it divides"""
        places = torch.arange(count)
        blocks = places[self.start :].view(self.groups, -1, self.parts, self.size)
        return torch.cat((places[: self.start], blocks.transpose(1, 2).flatten()))


@frozen
class StoredTensor:
    """A tensor under its published name.

    tensor: where it lies; of a stack of experts, one alone
    rows, columns: the orders that they have in the file, which divide them; None where that is
        theirs
    offset: what is added to each number
    is_rate: whether the file has -exp(x) for each number x
    """

    tensor: GgufTensor
    rows: Interleaving | None = None
    columns: Interleaving | None = None
    offset: int = 0
    is_rate: bool = False

    @property
    def has_whole_blocks(self) -> bool:
        """Whether its orders divide the rows and columns that are there."""
        shape = self.tensor.shape
        if self.rows is None and self.columns is None:
            return True
        # A list of packed numbers is one row, and a stack has rows in each of its matrices.
        if (self.tensor.type.is_packed and len(shape) == 1) or math.prod(shape[1:-1]) > 1:
            return False
        return (self.rows is None or self.rows.divides(shape[0])) and (
            self.columns is None or self.columns.divides(shape[-1])
        )
