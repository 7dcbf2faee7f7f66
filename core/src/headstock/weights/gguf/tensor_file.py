"""Read tensors of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from attrs import field, frozen
from torch import Tensor

from headstock.errors import ModelError
from headstock.weights.gguf.header import GgufTensor
from headstock.weights.gguf.stored_tensor import StoredTensor

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_NUMBERS_AT_ONCE = 1 << 20
"""How many numbers are unpacked at a time: a whole matrix in float32 would be the most memory that
a load takes."""


@frozen(eq=False)
class GgufFile:
    """A mapped file, whose tensors have published names.

    raises: ModelError when the file is not as large as it was
    """

    path: Path
    tensors: Mapping[str, StoredTensor]
    size: int
    _bytes: Tensor = field(init=False)

    @_bytes.default
    def _map(self) -> Tensor:
        size = self.path.stat().st_size
        if size != self.size:
            raise ModelError(
                f"{self.path} has {size} bytes and had {self.size} when it was read first; start "
                "again when nothing writes to it any more"
            )
        return torch.from_file(str(self.path), shared=False, size=size, dtype=torch.uint8)

    def read(self, name: str) -> Tensor:
        """Read a tensor on the CPU, in the type that holds it without a loss."""
        stored = self.tensors[name]
        out = torch.empty(stored.shape, dtype=_DTYPES[stored.stored])
        self.copy_into(out, name, (0,) * out.dim())
        return out

    def copy_into(self, out: Tensor, name: str, begin: tuple[int, ...]) -> None:
        """Write what a tensor stands for, or a part of it, on the device of `out`.

        begin: where the part begins
        writes: out
        """
        stored = self.tensors[name]
        shape = stored.shape
        if len(shape) == 3 and shape[1] == 1:  # a matrix, row by row
            out, begin, shape = out[:, 0], (begin[0], begin[2]), (shape[0], shape[2])
        if len(shape) == 1 and stored.tensor.type.is_packed:
            self._copy_matrices(out[None], stored, (1, *shape), (0, *begin), 0)
        elif len(shape) == 1:
            self._copy_matrices(out[:, None], stored, (*shape, 1), (*begin, 0), 0)
        else:
            self._copy_matrices(out, stored, shape, begin, 0)

    def _copy_matrices(
        self,
        out: Tensor,
        stored: StoredTensor,
        shape: tuple[int, ...],
        begin: tuple[int, ...],
        first_row: int,
    ) -> None:
        """Write a matrix, or each of a stack, which begins at that row of the tensor.

        writes: out
        """
        if len(shape) > 2:
            step = math.prod(shape[1:-1])
            for index, part in enumerate(out, start=begin[0]):
                self._copy_matrices(part, stored, shape[1:], begin[1:], first_row + index * step)
            return
        columns = shape[-1]
        order = None if stored.rows is None else stored.rows.list_places(shape[0])
        places = None if stored.columns is None else stored.columns.list_places(columns)
        end = begin[1] + out.shape[1]
        step = max(1, _NUMBERS_AT_ONCE // columns)
        for row in range(0, len(out), step):
            part = out[row : row + step]
            start = first_row + begin[0] + row
            taken = slice(start, start + len(part))
            chosen = taken if order is None else order[taken]
            numbers = self._read_rows(stored, chosen, columns, out.device)
            if stored.offset:
                numbers = numbers + stored.offset
            if stored.is_rate:
                if bool((numbers > 0).any()):
                    raise ModelError(
                        "ssm_a: expected rates of decay, which are below 0, got "
                        f"{float(numbers.max()):g}; convert the checkpoint again"
                    )
                numbers = numbers.float().neg().log()
            if places is None:
                part.copy_(numbers[:, begin[1] : end])
            else:
                part.copy_(numbers[:, places[begin[1] : end].to(out.device)])

    def _read_rows(
        self, stored: StoredTensor, chosen: Tensor | slice, columns: int, device: torch.device
    ) -> Tensor:
        """Rows of a tensor as the file has them.   chosen: which, a list where there is a second"""
        if stored.second is None:
            return self._unpack_rows(stored.tensor, chosen, columns, device)
        assert isinstance(chosen, Tensor)
        count = stored.tensor.shape[0]
        is_second = chosen >= count
        numbers = torch.empty((len(chosen), columns), device=device)
        for tensor, mask, first in (
            (stored.tensor, ~is_second, 0),
            (stored.second, is_second, count),
        ):
            rows = self._unpack_rows(tensor, chosen[mask] - first, columns, device)
            numbers[mask.to(device)] = rows.float()
        return numbers

    def _unpack_rows(
        self, tensor: GgufTensor, chosen: Tensor | slice, columns: int, device: torch.device
    ) -> Tensor:
        """Rows of a tensor of the file."""
        raw = self._bytes[tensor.start : tensor.start + tensor.nbytes]
        rows = raw.view(-1, columns // tensor.type.numbers * tensor.type.nbytes)
        blocks = rows[chosen].to(device).reshape(-1, tensor.type.nbytes)
        return tensor.type.unpack(blocks).view(-1, columns)
