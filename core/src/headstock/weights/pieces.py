"""Parts of checkpoint tensors, and their places in parameters."""

from __future__ import annotations

from attrs import evolve, frozen
from torch import Tensor


@frozen
class Piece:
    """A part of a checkpoint tensor, and its place in a parameter.

    shape: that of the whole tensor
    begin, size: where the part begins in it, and how much it is
    row: its row in a stack, or None
    out_begin: where it begins in the row
    is_swapped: whether the tensor has the last two dimensions of the parameter swapped
    """

    name: str
    shape: tuple[int, ...]
    begin: tuple[int, ...]
    size: tuple[int, ...]
    row: int | None
    out_begin: tuple[int, ...]
    is_swapped: bool = False

    def swap(self) -> Piece:
        """The same part of a tensor with its last two dimensions swapped."""
        shape, begin, size = map(swap_sizes, (self.shape, self.begin, self.size))
        return evolve(self, shape=shape, begin=begin, size=size, is_swapped=True)

    def view_in(self, parameter: Tensor) -> Tensor:
        """The place in the parameter."""
        view = parameter if self.row is None else parameter[self.row]
        sizes = swap_sizes(self.size) if self.is_swapped else self.size
        for axis, (begin, size) in enumerate(zip(self.out_begin, sizes, strict=True)):
            view = view.narrow(axis, begin, size)
        return view.mT if self.is_swapped else view


def swap_sizes(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes with the last two swapped."""
    return (*sizes[:-2], sizes[-1], sizes[-2])
