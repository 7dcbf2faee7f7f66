"""Where parameters come from: the files of a checkpoint, or noise."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch
from attrs import field, frozen
from safetensors import SafetensorError
from torch import Tensor

from headstock.errors import ModelError, shorten
from headstock.logs import LogEvent
from headstock.spi import ParamSpec, Shard, Weight, WeightFormat
from headstock.weights.packing import find_format, pack_pieces
from headstock.weights.pieces import Piece
from headstock.weights.quantization import (
    NOISE_STD,
    QuantReader,
    choose_noise_format,
    make_noise,
)
from headstock.weights.reader import CheckpointReader, plan_pieces

_CHECKED_NUMBERS = 1 << 20
"""How many numbers are summed at a time to see that all are finite."""


@frozen
class Packed:
    """A parameter in the format in which it is stored, and what reads it onto a device."""

    format: WeightFormat
    read: Callable[[torch.device], Weight]


class Source(Protocol):
    """Where tensors come from.

    remarks: what is odd about it, for the log
    """

    @property
    def remarks(self) -> tuple[LogEvent, ...]: ...

    def count_bytes(self, name: str, spec: ParamSpec, dtype: torch.dtype) -> int:
        """How many bytes are read, or made."""

    def fill(self, name: str, spec: ParamSpec, out: Tensor) -> None:
        """Write the tensor that the sources make.   writes: out    raises: ModelError"""

    def check(self, name: str, tensor: Tensor) -> None:
        """Raise ModelError when the finished tensor cannot be used."""

    def find_packed(self, name: str, spec: ParamSpec) -> Packed | None:
        """The parameter as it is stored and can stay; None for one that must be made plain."""


@frozen
class FileSource:
    """Tensors of a checkpoint, conversion and transfer in one copy."""

    checkpoint: CheckpointReader
    specs: Mapping[str, ParamSpec]
    whole: Mapping[str, ParamSpec]
    shard: Shard
    pieces: Mapping[str, list[Piece]] = field(init=False)

    @pieces.default
    def _plan(self) -> Mapping[str, list[Piece]]:
        return plan_pieces(self.specs, self.checkpoint, self.whole, self.shard)

    @property
    def remarks(self) -> tuple[LogEvent, ...]:
        return self.checkpoint.remarks

    def count_bytes(self, name: str, spec: ParamSpec, dtype: torch.dtype) -> int:
        return sum(
            self.checkpoint.nbytes(piece.name) * math.prod(piece.size) // math.prod(piece.shape)
            for piece in self.pieces[name]
        )

    def fill(self, name: str, spec: ParamSpec, out: Tensor) -> None:
        if sum(math.prod(piece.size) for piece in self.pieces[name]) < out.numel():
            out.zero_()  # a shard's slice is padded
        # Each piece is copied from the mapped file into its slice: neither the host nor the device
        # holds the pieces and their concatenation at once.
        for piece in self.pieces[name]:
            try:
                self.checkpoint.copy_into(piece.view_in(out), piece.name, piece.begin)
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"cannot read {piece.name} in {self.checkpoint.directory}: {shorten(error)}"
                ) from error

    def find_packed(self, name: str, spec: ParamSpec) -> Packed | None:
        format = find_format(spec, self.pieces[name], self.checkpoint)
        return None if format is None else Packed(format, partial(self._pack, name, format))

    def _pack(self, name: str, format: WeightFormat, device: torch.device) -> Weight:
        """Read a parameter in that format.   raises: ModelError"""
        try:
            return pack_pieces(self.specs[name], self.pieces[name], format, self.checkpoint, device)
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"cannot read {self.pieces[name][0].name} in {self.checkpoint.directory}: "
                f"{shorten(error)}"
            ) from error

    def check(self, name: str, tensor: Tensor) -> None:
        # After conversion: a float32 number beyond float16's range is infinite only there.
        if not is_finite(tensor):
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(
                f"{self.pieces[name][0].name} in {self.checkpoint.directory} holds NaN or "
                f"infinite numbers as {dtype}; the file is damaged or needs another dtype "
                "(--dtype)"
            )


@frozen
class NoiseSource:
    """Tensors without a checkpoint: the declared `dummy` value, else normal noise.

    The noise depends on the parameter's name alone.

    packing: how the configuration says that a checkpoint would be packed; None for plain numbers
    """

    packing: QuantReader | None = None
    remarks: tuple[LogEvent, ...] = ()

    def count_bytes(self, name: str, spec: ParamSpec, dtype: torch.dtype) -> int:
        return math.prod(spec.shape) * dtype.itemsize

    def fill(self, name: str, spec: ParamSpec, out: Tensor) -> None:
        if spec.dummy is not None:
            out.fill_(spec.dummy)
            return
        out.normal_(0.0, NOISE_STD, generator=_seed(name, out.device))

    def check(self, name: str, tensor: Tensor) -> None:
        """Noise is finite."""

    def find_packed(self, name: str, spec: ParamSpec) -> Packed | None:
        format = None if self.packing is None else choose_noise_format(spec, self.packing)
        if format is None:
            return None
        return Packed(format, lambda device: make_noise(spec.shape, format, _seed(name, device)))


def _seed(name: str, device: torch.device) -> torch.Generator:
    """The generator of a parameter's noise."""
    # By name, so that another layer or order changes no other parameter; crc32, since hash() of a
    # text differs from process to process.
    return torch.Generator(device).manual_seed(zlib.crc32(name.encode()))


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite."""
    # A sum is finite exactly when all its terms are: no weights are so large that float32
    # overflows. In parts, since a CPU widens what it sums to float32 first.
    parts = torch.split(tensor.flatten(), _CHECKED_NUMBERS)
    sums = torch.stack([part.sum(dtype=torch.float32) for part in parts])
    return bool(sums.isfinite().all())
