"""Files that tensors are read from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, Self

from attrs import frozen
from safetensors import safe_open
from torch import Tensor


class TensorFile(Protocol):
    """An open file of tensors, in memory that the system maps."""

    def read(self, name: str) -> Tensor:
        """Read a tensor on the CPU, in the type that holds it without a loss."""

    def copy_into(self, out: Tensor, name: str, begin: tuple[int, ...]) -> None:
        """Write a tensor or a part of it, converted and on the device of `out`.

        begin: where the part begins
        writes: out
        """


@frozen(eq=False)
class SafetensorsFile:
    """A file in the format of safetensors."""

    _file: Any

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map the file at `path`."""
        return cls(safe_open(path, framework="pt"))

    def read(self, name: str) -> Tensor:
        """Read a tensor as it is stored."""
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def copy_into(self, out: Tensor, name: str, begin: tuple[int, ...]) -> None:
        """Write a tensor or a part of it.   writes: out"""
        out.copy_(narrow(self.read(name), begin, tuple(out.shape)))


def narrow(tensor: Tensor, begin: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    """A part of the tensor."""
    for axis, (first, count) in enumerate(zip(begin, size, strict=True)):
        tensor = tensor.narrow(axis, first, count)
    return tensor
