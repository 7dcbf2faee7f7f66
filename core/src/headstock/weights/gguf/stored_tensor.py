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

    start: how many rows lie before the groups, in order
    groups: how many groups there are, of the same size
    parts: how many parts take turns in a group
    sizes: how many rows the first block of a part has, the second, and so on, again and again
    """

    start: int
    groups: int
    parts: int
    sizes: tuple[int, ...]

    def divides(self, count: int) -> bool:
        """Whether so many rows can have this order."""
        if min(self.groups, self.parts, *self.sizes) < 1 or not 0 <= self.start < count:
            return False
        return not (count - self.start) % (self.groups * self.parts * sum(self.sizes))

    def list_places(self, count: int) -> Tensor:
        """Which row of the file each row is.   count: of rows that it divides"""
        places = torch.arange(count)
        rounds = places[self.start :].view(self.groups, -1, self.parts * sum(self.sizes))
        turns = torch.split(rounds, [self.parts * size for size in self.sizes], -1)
        blocks = [turn.reshape(*turn.shape[:2], self.parts, -1) for turn in turns]
        ordered = torch.cat(blocks, -1).transpose(1, 2).flatten()
        return torch.cat((places[: self.start], ordered))


@frozen
class StoredTensor:
    """A tensor under its published name.

    tensor: where it lies; of a stack of experts, one alone
    rows, columns: the orders that they have in the file, which divide them; None where that is
        theirs
    offset: what is added to each number
    is_rate: whether the file has -exp(x) for each number x
    second: where the rows lie that are behind those in the order of `rows`, if it is a tensor of
        its own
    """

    tensor: GgufTensor
    rows: Interleaving | None = None
    columns: Interleaving | None = None
    offset: int = 0
    is_rate: bool = False
    second: GgufTensor | None = None

    @property
    def tensors(self) -> tuple[GgufTensor, ...]:
        """Where its rows lie."""
        return (self.tensor,) if self.second is None else (self.tensor, self.second)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all its rows."""
        return (sum(each.shape[0] for each in self.tensors), *self.tensor.shape[1:])

    @property
    def stored(self) -> str:
        """The name of the type that holds its numbers without a loss."""
        names = {each.type.stored for each in self.tensors}
        return names.pop() if len(names) == 1 else "F32"

    @property
    def nbytes(self) -> int:
        """Bytes of the file that it takes."""
        return sum(each.nbytes for each in self.tensors)

    @property
    def has_whole_blocks(self) -> bool:
        """Whether its orders divide the rows and columns that are there."""
        shape = self.shape
        if self.second is not None and (
            self.rows is None or len(shape) != 2 or self.second.shape[1:] != shape[1:]
        ):
            return False
        if self.rows is None and self.columns is None:
            return True
        # A list of packed numbers is one row, and a stack has rows in each of its matrices.
        if (self.tensor.type.is_packed and len(shape) == 1) or math.prod(shape[1:-1]) > 1:
            return False
        return (self.rows is None or self.rows.divides(shape[0])) and (
            self.columns is None or self.columns.divides(shape[-1])
        )
